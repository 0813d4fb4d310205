// What the bindings call: kernels on plain pointers, sizes and a stream, all of whose memory the caller owns.
//
// Neither torch nor CUDA headers are needed to include this: bindings compile without nvcc, kernels without torch.
// Tensors are contiguous unless documented otherwise, and `rows` times `columns` large; a null bias means none. A
// launch that fails throws std::runtime_error.
#pragma once

#include <cstdint>

#include "../mask.h"

typedef struct CUstream_st* cudaStream_t;  // as in the toolkit's own headers

namespace megalite::cuda {

enum class Dtype { kDouble, kFloat, kBFloat16, kHalf };

// Sums over the rows of each column are added up in parts, and then the parts in a fixed order: how many there are at
// most. A `workspace` holds that many of all the sums, in fp32 (fp64 for fp64).
int64_t max_sum_parts(Dtype dtype, int64_t rows, int64_t columns);

void bias_gelu(
    Dtype dtype, const void* x, const void* bias, void* out, int64_t rows, int64_t columns, cudaStream_t stream);

void bias_gelu_backward(
    Dtype dtype, const void* grad, const void* x, const void* bias, void* x_grad, void* bias_grad, void* workspace,
    int64_t rows, int64_t columns, cudaStream_t stream);

// `columns` are those of the output: x, its bias and their gradients have twice as many.
void bias_swiglu(
    Dtype dtype, const void* x, const void* bias, void* out, int64_t rows, int64_t columns, cudaStream_t stream);

void bias_swiglu_backward(
    Dtype dtype, const void* grad, const void* x, const void* bias, void* x_grad, void* bias_grad, void* workspace,
    int64_t rows, int64_t columns, cudaStream_t stream);

// Where the elements of a row are in their sample's random numbers: row r is of sample samples[r % num_samples], and
// its first element has the index base + r / num_samples * stride there.
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

// What an update of AdamW depends on: numbers of the host, and scalars that the device reads. A null divisor means 1.
struct Rates {
  double learning_rate, beta1, beta2, weight_decay, epsilon;
};

struct Scalars {
  const float* number;
  const double* divisor;
  const bool* is_good;
};

// `dtype` is that of `rounded`, or if this is null that of all; the others are in fp32, in fp64 for fp64.
void adamw(
    Dtype dtype, void* main, void* exp_avg, void* exp_avg_sq, void* rounded, const void* gradient, int64_t num,
    Rates rates, Scalars scalars, cudaStream_t stream);

void fill_normal(
    Dtype dtype, void* out, int64_t num, double std, double mean, uint64_t key, int64_t base, int64_t run_length,
    int64_t run_stride, cudaStream_t stream);

// Heads of x [s, b, n, d] are apart by `steps` (in elements, of its first three dims); `out` is contiguous. The tables
// [s, table_batch, d] are in fp32, in fp64 for fp64.
struct Heads {
  int64_t sequence, batch, heads, d, steps[3], table_batch;
};

void rotate(
    Dtype dtype, const void* x, const void* cosine, const void* sine, void* out, Heads shape, bool inverse,
    cudaStream_t stream);

// The columns of logits [rows, columns]: tokens of the vocabulary from `start` on, but for padding from num_real on.
struct Vocabulary {
  int64_t columns, start, num_real;
};

// `out` is [3, rows], in fp32, in fp64 for fp64; so are statistics, [2, rows], and grad, [rows].
void cross_entropy_statistics(
    Dtype dtype, const void* logits, const int64_t* targets, void* out, int64_t rows, Vocabulary vocabulary,
    cudaStream_t stream);

void cross_entropy_gradient(
    Dtype dtype, void* logits, const int64_t* targets, const void* statistics, const void* grad, int64_t rows,
    Vocabulary vocabulary, cudaStream_t stream);

// Scores [b, num_heads, rows, keys] of the queries from `first` on, in a sequence of `seq_length`. Pointers are null
// for absent arguments: slopes [num_heads], starts and ends [b, seq_length], samples [b], the latter for dropout alone.
struct Scores {
  int64_t num_heads, rows, keys, first, seq_length, base;
  double scale;
  const double* slopes;
  const int64_t *starts, *ends, *samples;
};

// `num` is b * num_heads * rows; log_sums, one for each, are in fp32, in fp64 for fp64.
void causal_softmax(
    Dtype dtype, void* scores, void* log_sums, int64_t num, Scores problem, Mask mask, cudaStream_t stream);

void causal_softmax_backward(
    Dtype dtype, void* scores, void* grad, const void* log_sums, int64_t num, Scores problem, Mask mask,
    cudaStream_t stream);

// RMSNorm, or LayerNorm where it centres: that alone has a bias, and bias_grad after the `columns` of weight_grad.
struct Norm {
  bool centres;
  double epsilon;
};

void norm(
    Dtype dtype, Norm kind, const void* x, const void* weight, const void* bias, void* out, int64_t rows,
    int64_t columns, cudaStream_t stream);

// How many parts norm_backward adds up: its workspace holds as many times the parameters' gradients, in fp32 (fp64 for
// fp64).
int64_t num_norm_parts(int64_t rows);

// A residual_grad that is not null is added to the input's gradient.
void norm_backward(
    Dtype dtype, Norm kind, const void* grad, const void* x, const void* weight, const void* residual_grad,
    void* x_grad, void* parameter_grads, void* workspace, int64_t rows, int64_t columns, cudaStream_t stream);

// `sum`, which is bias_dropout_add, and its norm.
void bias_dropout_add_norm(
    Dtype dtype, Norm kind, const void* x, const void* bias, const void* residual, const void* weight,
    const void* norm_bias, void* sum, void* out, int64_t rows, int64_t columns, Site site, Mask mask,
    cudaStream_t stream);

// The gradient of x's bias follows those of norm_backward in parameter_grads. A null x_grad is residual_grad, as nothing
// is dropped. The workspace holds num_norm_parts of the parameters' gradients, or max_sum_parts of the bias'.
void bias_dropout_add_norm_backward(
    Dtype dtype, Norm kind, const void* grad, const void* sum_grad, const void* sum, const void* weight,
    void* residual_grad, void* x_grad, void* parameter_grads, void* workspace, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream);

}  // namespace megalite::cuda
