// Launchers of the kernels, for the bindings: they take plain pointers, sizes and a stream. The caller owns all memory.
//
// This header includes neither torch nor CUDA headers: bindings compile without nvcc, and kernels without torch.
// Unless documented otherwise, tensors are contiguous and have `rows` x `columns` elements. A null bias means no bias.
// A failed launch throws std::runtime_error.
#pragma once

#include <cstdint>

#include "../mask.h"

typedef struct CUstream_st* cudaStream_t;  // as in the toolkit's own headers

namespace megalite::cuda {

enum class Dtype { kDouble, kFloat, kBFloat16, kHalf };

// The largest number of parts of a column sum: rows are summed in parts, and then the parts are summed in a fixed
// order. A `workspace` holds this many parts of all sums, in fp32 (fp64 for fp64).
int64_t max_sum_parts(Dtype dtype, int64_t rows, int64_t columns);

void bias_gelu(
    Dtype dtype, const void* x, const void* bias, void* out, int64_t rows, int64_t columns, cudaStream_t stream);

void bias_gelu_backward(
    Dtype dtype, const void* grad, const void* x, const void* bias, void* x_grad, void* bias_grad, void* workspace,
    int64_t rows, int64_t columns, cudaStream_t stream);

// `columns` is the output's number of columns: x, its bias and their gradients have twice as many.
void bias_swiglu(
    Dtype dtype, const void* x, const void* bias, void* out, int64_t rows, int64_t columns, cudaStream_t stream);

void bias_swiglu_backward(
    Dtype dtype, const void* grad, const void* x, const void* bias, void* x_grad, void* bias_grad, void* workspace,
    int64_t rows, int64_t columns, cudaStream_t stream);

// The position of a row's elements in their sample's random numbers: row r belongs to sample
// samples[r % num_samples], and its first element has index base + r / num_samples * stride in it.
struct Site {
  const int64_t* samples;
  int64_t num_samples, base, stride;
};

void dropout(
    Dtype dtype, const void* x, void* out, int64_t rows, int64_t columns, Site site, Mask mask, cudaStream_t stream);

void bias_dropout_add(
    Dtype dtype, const void* x, const void* bias, const void* residual, void* out, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream);

void bias_dropout_add_backward(
    Dtype dtype, const void* grad, void* x_grad, void* bias_grad, void* workspace, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream);

// The settings of an AdamW update: numbers on the host, and scalars that the device reads. A null divisor means 1.
struct Rates {
  double learning_rate, beta1, beta2, weight_decay, epsilon;
};

struct Scalars {
  const float* number;
  const double* divisor;
  const bool* is_good;
};

// `dtype` is the dtype of `rounded`, or of all tensors if it is null. The others are in fp32 (fp64 for fp64).
void adamw(
    Dtype dtype, void* main, void* exp_avg, void* exp_avg_sq, void* rounded, const void* gradient, int64_t num,
    Rates rates, Scalars scalars, cudaStream_t stream);

void fill_normal(
    Dtype dtype, void* out, int64_t num, double std, double mean, uint64_t key, int64_t base, int64_t run_length,
    int64_t run_stride, cudaStream_t stream);

// `steps` are the strides of the first three dims of x [s, b, n, d] in elements; `out` is contiguous. The tables
// [s, table_batch, d] are in fp32 (fp64 for fp64).
struct Heads {
  int64_t sequence, batch, heads, d, steps[3], table_batch;
};

void rotate(
    Dtype dtype, const void* x, const void* cosine, const void* sine, void* out, Heads shape, bool inverse,
    cudaStream_t stream);

// The columns of logits [rows, columns] are the vocabulary's tokens from `start` on; from num_real on they are padding.
struct Vocabulary {
  int64_t columns, start, num_real;
};

// `out` [3, rows], statistics [2, rows] and grad [rows] are in fp32 (fp64 for fp64).
void cross_entropy_statistics(
    Dtype dtype, const void* logits, const int64_t* targets, void* out, int64_t rows, Vocabulary vocabulary,
    cudaStream_t stream);

void cross_entropy_gradient(
    Dtype dtype, void* logits, const int64_t* targets, const void* statistics, const void* grad, int64_t rows,
    Vocabulary vocabulary, cudaStream_t stream);

// Scores [b, num_heads, rows, keys] of the queries from `first` on, in a sequence of `seq_length`. Pointers of absent
// arguments are null: slopes [num_heads], starts and ends [b, seq_length], samples [b]. Only dropout needs samples.
struct Scores {
  int64_t num_heads, rows, keys, first, seq_length, base;
  double scale;
  const double* slopes;
  const int64_t *starts, *ends, *samples;
};

// `num` is b * num_heads * rows; log_sums [num] are in fp32 (fp64 for fp64).
void causal_softmax(
    Dtype dtype, void* scores, void* log_sums, int64_t num, Scores problem, Mask mask, cudaStream_t stream);

void causal_softmax_backward(
    Dtype dtype, void* scores, void* grad, const void* log_sums, int64_t num, Scores problem, Mask mask,
    cudaStream_t stream);

// RMSNorm, or LayerNorm if it centres. Only LayerNorm has a bias; bias_grad follows the `columns` of weight_grad.
struct Norm {
  bool centres;
  double epsilon;
};

void norm(
    Dtype dtype, Norm kind, const void* x, const void* weight, const void* bias, void* out, int64_t rows,
    int64_t columns, cudaStream_t stream);

// The number of parts that norm_backward sums: its workspace holds the parameters' gradients this many times, in fp32
// (fp64 for fp64).
int64_t num_norm_parts(int64_t rows);

// residual_grad is added to the input's gradient unless it is null.
void norm_backward(
    Dtype dtype, Norm kind, const void* grad, const void* x, const void* weight, const void* residual_grad,
    void* x_grad, void* parameter_grads, void* workspace, int64_t rows, int64_t columns, cudaStream_t stream);

// Computes `sum`, the result of bias_dropout_add, and its norm.
void bias_dropout_add_norm(
    Dtype dtype, Norm kind, const void* x, const void* bias, const void* residual, const void* weight,
    const void* norm_bias, void* sum, void* out, int64_t rows, int64_t columns, Site site, Mask mask,
    cudaStream_t stream);

// In parameter_grads, the gradient of x's bias follows the gradients of norm_backward. x_grad is null if it equals
// residual_grad because nothing is dropped. The workspace holds num_norm_parts parts of the parameters' gradients, or
// max_sum_parts parts of the bias' gradient.
void bias_dropout_add_norm_backward(
    Dtype dtype, Norm kind, const void* grad, const void* sum_grad, const void* sum, const void* weight,
    void* residual_grad, void* x_grad, void* parameter_grads, void* workspace, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream);

}  // namespace megalite::cuda
