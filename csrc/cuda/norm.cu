// RMSNorm and LayerNorm on a GPU; see megalite/kernels/norm.py.
//
// A block reads its row from memory once. In backward it holds the row in registers, and also the parameters' sums
// over its rows. PyTorch's kernel (ATen/native/cuda/layer_norm_kernel.cu) reads x and the gradient a second time, in a
// separate kernel for the parameters. A longer row is read again from the multiprocessor's cache, and its sums are in
// shared memory.
#include "norm.cuh"

#include "rows.cuh"

namespace megalite::cuda {

extern __shared__ __align__(kVectorBytes) double dynamic_shared[];

namespace {

template <bool kCentres, int kWidth, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) norm_kernel(
    const T* x, const T* weight, const T* bias, T* out, int64_t columns, double epsilon) {
  const T* from = x + blockIdx.x * columns;
  const auto row = streamed_row<kNormSlots>(
      columns / kWidth, [=](int64_t vector) { return load<kWidth>(from + vector * kWidth); });
  write_norm<kCentres, kWidth>(row, weight, bias, out + blockIdx.x * columns, columns, epsilon);
}

// Writes the block's part of the parameters' gradients to parts[block].
template <bool kCentres, bool kHolds, int kWidth, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) backward_kernel(
    const GradientInputs<T> inputs, T* x_grad, const T* weight, Wide<T>* parts, int64_t rows, int64_t columns,
    double epsilon) {
  using W = Wide<T>;
  constexpr int kSums = kNormSums<kCentres>;
  const auto finish = [=](int64_t r, int64_t vector, const auto& of_x, const auto&) {
    store(x_grad + r * columns + vector * kWidth, narrow_all<T>(of_x));
  };
  const auto row_of = [=](int64_t r) {
    const auto load = [=](int64_t vector) {
      return inputs.template load_at<kWidth>(r * columns + vector * kWidth);
    };
    if constexpr (kHolds) {
      return held_row<kNormGradSlots>(columns / kWidth, load);
    } else {
      return streamed_row<kNormGradSlots>(columns / kWidth, load);
    }
  };
  W* part = parts + blockIdx.x * kSums * columns;
  if constexpr (kHolds) {
    const HeldSums<kSums, kWidth, kNormGradSlots, W> sums{columns};
    norm_gradients<kCentres, kWidth>(row_of, sums, finish, weight, part, rows, columns, epsilon);
  } else {
    const SharedSums<kSums, kWidth, W> sums(reinterpret_cast<W*>(dynamic_shared), columns);
    norm_gradients<kCentres, kWidth>(row_of, sums, finish, weight, part, rows, columns, epsilon);
  }
}

}  // namespace

void norm(
    Dtype dtype, Norm kind, const void* x, const void* weight, const void* bias, void* out, int64_t rows,
    int64_t columns, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  const auto start = [&](auto element, auto width, auto centres) {
    using T = decltype(element);
    launch(
        norm_kernel<decltype(centres)::value, decltype(width)::value, T>, block_each(rows),
        span_threads<T, kNormSlots>(columns), 0, stream, static_cast<const T*>(x), static_cast<const T*>(weight),
        static_cast<const T*>(bias), static_cast<T*>(out), columns, kind.epsilon);
  };
  dispatch_norm(dtype, kind, columns, start, x, weight, bias, out);
}

int64_t num_norm_parts(int64_t rows) {
  return std::clamp<int64_t>((rows + kPartRows - 1) / kPartRows, 1, kMaxParts);
}

void norm_backward(
    Dtype dtype, Norm kind, const void* grad, const void* x, const void* weight, const void* residual_grad,
    void* x_grad, void* parameter_grads, void* workspace, int64_t rows, int64_t columns, cudaStream_t stream) {
  if (columns == 0) return;
  const int64_t num_parts = num_norm_parts(rows), num_sums = kind.centres ? 2 * columns : columns;
  const auto start = [&](auto element, auto width, auto centres) {
    using T = decltype(element);
    constexpr bool kCentres = decltype(centres)::value;
    constexpr int kWidth = decltype(width)::value;
    const GradientInputs<T> inputs = {
        static_cast<const T*>(x), static_cast<const T*>(grad), static_cast<const T*>(residual_grad)};
    const auto start_kernel = [&](auto kernel, size_t shared_bytes) {
      launch(
          kernel, dim3(static_cast<unsigned>(num_parts)), span_threads<T, kNormGradSlots>(columns), shared_bytes,
          stream, inputs, static_cast<T*>(x_grad), static_cast<const T*>(weight), static_cast<Wide<T>*>(workspace),
          rows, columns, kind.epsilon);
    };
    if (kWidth > 1 && fits_block<T, kNormGradSlots>(columns)) {
      start_kernel(backward_kernel<kCentres, true, kVectorWidth<T>, T>, 0);
    } else {
      start_kernel(backward_kernel<kCentres, false, kWidth, T>, num_sums * sizeof(Wide<T>));
    }
    add_parts<T>(workspace, parameter_grads, num_parts, num_sums, stream);
  };
  dispatch_norm(dtype, kind, columns, start, grad, x, weight, residual_grad, x_grad);
}

}  // namespace megalite::cuda
