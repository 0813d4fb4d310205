// RMSNorm and LayerNorm on a GPU; see megalite/kernels/norm.py.
//
// A block reads its row from memory once: what it reads again is in its multiprocessor's cache. Backward walks down
// rows and holds the sums for the parameters in shared memory, so that it reads x and the gradient once too; PyTorch's
// (ATen/native/cuda/layer_norm_kernel.cu) reads both a second time, in a kernel of its own for the parameters.
#include "elementary.cuh"
#include "rows.cuh"
#include "span.cuh"

namespace megalite::cuda {

extern __shared__ __align__(kVectorBytes) double dynamic_shared[];

namespace {

constexpr int kInFlight = 4, kInFlightBackward = 2;  // vectors that a thread reads before it uses the first
constexpr int64_t kPartRows = 8, kMaxParts = 1024;  // rows that are worth a part of the sums: 2048 keep a GPU busy

template <int kNum, class W>
using WarpValues = W[kMaxSpanThreads / kWarp][kNum];

// The mean of a row; RMSNorm uses 0.
template <bool kCentres, int kWidth, class T>
__device__ __forceinline__ Wide<T> mean_of(const T* row, int64_t columns, WarpValues<1, Wide<T>>& shared) {
  using W = Wide<T>;
  if constexpr (!kCentres) return W{0};
  W sums[1] = {};
  for_vectors<kInFlight>(
      columns / kWidth, [=](int64_t vector) { return load<kWidth>(row + vector * kWidth); },
      [&](const auto& loaded, int64_t) {
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) sums[0] += loaded[i];
      });
  block_sums(sums, shared);
  return sums[0] / static_cast<W>(columns);
}

template <class W>
__device__ __forceinline__ W inverse_root(W sum_of_squares, int64_t columns, double epsilon) {
  return W{1} / sqrt(sum_of_squares / static_cast<W>(columns) + static_cast<W>(epsilon));
}

template <bool kCentres, int kWidth, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) norm_kernel(
    const T* x, const T* weight, const T* bias, T* out, int64_t columns, double epsilon) {
  using W = Wide<T>;
  __shared__ WarpValues<1, W> shared;
  const T* row = x + blockIdx.x * columns;
  T* result = out + blockIdx.x * columns;
  const auto load_row = [=](int64_t vector) { return load<kWidth>(row + vector * kWidth); };
  const W mean = mean_of<kCentres, kWidth>(row, columns, shared);
  W squares[1] = {};
  for_vectors<kInFlight>(columns / kWidth, load_row, [&](const auto& loaded, int64_t) {
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const W centred = loaded[i] - mean;
      squares[0] = multiply_add(centred, centred, squares[0]);
    }
  });
  block_sums(squares, shared);
  const W inverse = inverse_root(squares[0], columns, epsilon);
  for_vectors<kInFlight>(columns / kWidth, load_row, [=](const auto& loaded, int64_t vector) {
    W weights[kWidth], added[kWidth];
    load_wide<kWidth>(weights, weight + vector * kWidth);
    load_wide<kWidth>(added, kCentres ? bias + vector * kWidth : nullptr);
    W y[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      y[i] = multiply_add((loaded[i] - mean) * inverse, weights[i], added[i]);
    }
    store(result + vector * kWidth, narrow_all<T>(y));
  });
}

// What backward reads of one row. `residual` is null if no other gradient is added to the input's.
template <class T>
struct Row {
  const T *x, *grad, *residual;
  T* x_grad;
};

template <class W>
struct Statistics {
  W mean, inverse;  // of the row: 1 / its standard deviation
  W along, level;   // how much of the gradient is along the normal row, and its mean: neither changes the output
};

template <bool kCentres, int kWidth, class T>
__device__ __forceinline__ Statistics<Wide<T>> statistics_of(
    const Row<T>& row, const T* weight, int64_t columns, double epsilon) {
  using W = Wide<T>;
  constexpr int kSums = kCentres ? 3 : 2;
  struct Pair {
    Vector<T, kWidth> x, grad;
  };
  __shared__ WarpValues<1, W> shared_mean;
  __shared__ WarpValues<kSums, W> shared;
  const W mean = mean_of<kCentres, kWidth>(row.x, columns, shared_mean);
  W sums[kSums] = {};  // of the squares, of the gradient along the row, and of the gradient
  for_vectors<kInFlightBackward>(
      columns / kWidth,
      [=](int64_t vector) {
        return Pair{load<kWidth>(row.x + vector * kWidth), load<kWidth>(row.grad + vector * kWidth)};
      },
      [&](const auto& pair, int64_t vector) {
        W weights[kWidth];
        load_wide<kWidth>(weights, weight + vector * kWidth);
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const W centred = pair.x[i] - mean, y = pair.grad[i] * weights[i];
          sums[0] = multiply_add(centred, centred, sums[0]);
          sums[1] = multiply_add(y, centred, sums[1]);
          if constexpr (kCentres) sums[kSums - 1] += y;
        }
      });
  block_sums(sums, shared);
  const W inverse = inverse_root(sums[0], columns, epsilon), count = static_cast<W>(columns);
  return {mean, inverse, sums[1] * inverse / count, kCentres ? sums[kSums - 1] / count : W{0}};
}

// Writes the gradient of a row's input, and adds what the row has for the parameters.
template <bool kCentres, int kWidth, class T>
__device__ __forceinline__ void write_row(
    const Row<T>& row, const Statistics<Wide<T>>& of_row, const T* weight, Wide<T>* weight_sums, Wide<T>* bias_sums,
    int64_t columns) {
  using W = Wide<T>;
  struct Loaded {
    Vector<T, kWidth> x, grad, residual;
  };
  for_vectors<kInFlightBackward>(
      columns / kWidth,
      [=](int64_t vector) {
        const int64_t at = vector * kWidth;
        Loaded loaded = {load<kWidth>(row.x + at), load<kWidth>(row.grad + at), {}};
        if (row.residual != nullptr) loaded.residual = load<kWidth>(row.residual + at);
        return loaded;
      },
      [=](const auto& loaded, int64_t vector) {
        W weights[kWidth];
        load_wide<kWidth>(weights, weight + vector * kWidth);
        auto of_weight = load<kWidth>(weight_sums + vector * kWidth);
        W of_x[kWidth];
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const W normal = (loaded.x[i] - of_row.mean) * of_row.inverse;
          const W y = loaded.grad[i];
          const W inner = multiply_add(-normal, of_row.along, multiply_add(y, weights[i], -of_row.level));
          of_x[i] = multiply_add(of_row.inverse, inner, loaded.residual[i]);
          of_weight.words[i] = multiply_add(y, normal, of_weight.words[i]);
        }
        store(row.x_grad + vector * kWidth, narrow_all<T>(of_x));
        store(weight_sums + vector * kWidth, of_weight);
        if constexpr (kCentres) {
          auto of_bias = load<kWidth>(bias_sums + vector * kWidth);
          MEGALITE_UNROLL
          for (int i = 0; i < kWidth; ++i) of_bias.words[i] += loaded.grad[i];
          store(bias_sums + vector * kWidth, of_bias);
        }
      });
}

// Leaves the block's part of the parameters' gradients in parts[block]. Its rows are every gridDim.x-th.
template <bool kCentres, int kWidth, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) backward_kernel(
    const Row<T> all, const T* weight, Wide<T>* parts, int64_t rows, int64_t columns, double epsilon) {
  using W = Wide<T>;
  W* weight_sums = reinterpret_cast<W*>(dynamic_shared);
  W* bias_sums = weight_sums + columns;
  const int64_t vectors = columns / kWidth;
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {  // each thread has its own columns' sums
    store(weight_sums + i * kWidth, Vector<W, kWidth>{});
    if constexpr (kCentres) store(bias_sums + i * kWidth, Vector<W, kWidth>{});
  }
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const int64_t at = r * columns;
    const Row<T> row = {
        all.x + at, all.grad + at, all.residual == nullptr ? nullptr : all.residual + at, all.x_grad + at};
    const auto of_row = statistics_of<kCentres, kWidth>(row, weight, columns, epsilon);
    write_row<kCentres, kWidth>(row, of_row, weight, weight_sums, bias_sums, columns);
  }
  const int64_t num_sums = kCentres ? 2 * columns : columns;
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    W* part = parts + blockIdx.x * num_sums + i * kWidth;
    store(part, load<kWidth>(weight_sums + i * kWidth));
    if constexpr (kCentres) store(part + columns, load<kWidth>(bias_sums + i * kWidth));
  }
}

// Calls `function` with a value of the element type and two constants: an access' width, whether the norm centres.
template <class Function, class... Pointers>
void dispatch_norm(Dtype dtype, Norm kind, int64_t columns, const Function& function, const Pointers*... pointers) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), pointers...), [&](auto width) {
      if (kind.centres) return function(element, width, std::true_type{});
      return function(element, width, std::false_type{});
    });
  });
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
        span_threads<T, kInFlight>(columns), 0, stream, static_cast<const T*>(x), static_cast<const T*>(weight),
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
    const Row<T> all = {
        static_cast<const T*>(x), static_cast<const T*>(grad), static_cast<const T*>(residual_grad),
        static_cast<T*>(x_grad)};
    launch(
        backward_kernel<decltype(centres)::value, decltype(width)::value, T>, dim3(static_cast<unsigned>(num_parts)),
        span_threads<T, kInFlightBackward>(columns), num_sums * sizeof(Wide<T>), stream, all,
        static_cast<const T*>(weight), static_cast<Wide<T>*>(workspace), rows, columns, kind.epsilon);
    add_parts<T>(workspace, parameter_grads, num_parts, num_sums, stream);
  };
  dispatch_norm(dtype, kind, columns, start, grad, x, weight, residual_grad, x_grad);
}

}  // namespace megalite::cuda
