// The sum that ends a block of the transformer and the norm that begins the next one, on a GPU; see
// megalite/kernels/norm.py. A block holds its row in registers; longer rows use two kernels.
#include "dropout_add.cuh"
#include "norm.cuh"
#include "rows.cuh"

namespace megalite::cuda {
namespace {

template <class T>
struct SumTerms {
  Vector<T, kVectorWidth<T>> x, residual;
};

template <bool kCentres, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) add_norm_kernel(
    const T* x, const T* bias, const T* residual, T* sum, const DropMask mask, const T* weight, const T* norm_bias,
    T* out, int64_t columns, double epsilon) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t r = blockIdx.x, first = r * columns;
  const auto terms = held_row<kNormSlots>(columns / kWidth, [=](int64_t vector) {
    const int64_t at = first + vector * kWidth;
    return SumTerms<T>{load<kWidth>(x + at), load<kWidth>(residual + at)};
  });
  HeldRow<kNormSlots, Vector<T, kWidth>> row{terms.vectors};
  terms.each([&](const SumTerms<T>& loaded, int64_t vector, int slot) {
    const int64_t column = vector * kWidth;
    Wide<T> added[kWidth];
    load_wide<kWidth>(added, bias == nullptr ? bias : bias + column);
    row.loaded[slot] = residual_sum(loaded.x, added, loaded.residual, mask, r, column);
    store(sum + first + column, row.loaded[slot]);
  });
  write_norm<kCentres, kWidth>(row, weight, norm_bias, out + first, columns, epsilon);
}

// Writes the block's part of the gradients of the norm's parameters and of the bias to parts[block].
template <bool kCentres, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) backward_kernel(
    const GradientInputs<T> inputs, T* residual_grad, T* x_grad, const DropMask mask, const T* weight, Wide<T>* parts,
    int64_t rows, int64_t columns, double epsilon) {
  using W = Wide<T>;
  constexpr int kWidth = kVectorWidth<T>, kSums = kNormSums<kCentres> + 1;
  const auto row_of = [=](int64_t r) {
    return held_row<kNormGradSlots>(columns / kWidth, [=](int64_t vector) {
      return inputs.template load_at<kWidth>(r * columns + vector * kWidth);
    });
  };
  const auto finish = [=](int64_t r, int64_t vector, const auto& of_sum, auto& sums) {
    const int64_t column = vector * kWidth;
    const auto rounded = narrow_all<T>(of_sum);
    store(residual_grad + r * columns + column, rounded);
    W of_x[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) of_x[i] = rounded[i];
    if (x_grad != nullptr) {
      mask.apply(of_x, r, column);
      store(x_grad + r * columns + column, narrow_all<T>(of_x));
    }
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) sums[kNormSums<kCentres>].words[i] += of_x[i];
  };
  const HeldSums<kSums, kWidth, kNormGradSlots, W> sums{columns};
  W* part = parts + blockIdx.x * kSums * columns;
  norm_gradients<kCentres, kWidth>(row_of, sums, finish, weight, part, rows, columns, epsilon);
}

}  // namespace

void bias_dropout_add_norm(
    Dtype dtype, Norm kind, const void* x, const void* bias, const void* residual, const void* weight,
    const void* norm_bias, void* sum, void* out, int64_t rows, int64_t columns, Site site, Mask mask,
    cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  const auto start = [&](auto element, auto width, auto centres) {
    using T = decltype(element);
    if (decltype(width)::value != kVectorWidth<T> || !fits_block<T, kNormSlots>(columns)) {
      bias_dropout_add(dtype, x, bias, residual, sum, rows, columns, site, mask, stream);
      norm(dtype, kind, sum, weight, norm_bias, out, rows, columns, stream);
      return;
    }
    launch(
        add_norm_kernel<decltype(centres)::value, T>, block_each(rows), span_threads<T, kNormSlots>(columns), 0,
        stream, static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const T*>(residual),
        static_cast<T*>(sum), DropMask::of(site, mask, rows), static_cast<const T*>(weight),
        static_cast<const T*>(norm_bias), static_cast<T*>(out), columns, kind.epsilon);
  };
  dispatch_norm(dtype, kind, columns, start, x, bias, residual, weight, norm_bias, sum, out);
}

void bias_dropout_add_norm_backward(
    Dtype dtype, Norm kind, const void* grad, const void* sum_grad, const void* sum, const void* weight,
    void* residual_grad, void* x_grad, void* parameter_grads, void* workspace, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream) {
  if (columns == 0) return;
  const int64_t num_parts = num_norm_parts(rows), num_norm_sums = kind.centres ? 2 * columns : columns;
  const auto start = [&](auto element, auto width, auto centres) {
    using T = decltype(element);
    if (decltype(width)::value != kVectorWidth<T> || !fits_block<T, kNormGradSlots>(columns)) {
      norm_backward(
          dtype, kind, grad, sum, weight, sum_grad, residual_grad, parameter_grads, workspace, rows, columns, stream);
      bias_dropout_add_backward(
          dtype, residual_grad, x_grad == nullptr ? residual_grad : x_grad,
          static_cast<T*>(parameter_grads) + num_norm_sums, workspace, rows, columns, site, mask, stream);
      return;
    }
    const GradientInputs<T> inputs = {
        static_cast<const T*>(sum), static_cast<const T*>(grad), static_cast<const T*>(sum_grad)};
    launch(
        backward_kernel<decltype(centres)::value, T>, dim3(static_cast<unsigned>(num_parts)),
        span_threads<T, kNormGradSlots>(columns), 0, stream, inputs, static_cast<T*>(residual_grad),
        static_cast<T*>(x_grad), DropMask::of(site, mask, rows), static_cast<const T*>(weight),
        static_cast<Wide<T>*>(workspace), rows, columns, kind.epsilon);
    add_parts<T>(workspace, parameter_grads, num_parts, num_norm_sums + columns, stream);
  };
  dispatch_norm(dtype, kind, columns, start, grad, sum_grad, sum, weight, residual_grad, x_grad);
}

}  // namespace megalite::cuda
