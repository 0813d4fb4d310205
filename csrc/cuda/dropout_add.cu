// Bias, dropout and residual add on a GPU; see megalite/kernels/dropout.py.
#include "dropout_add.cuh"
#include "rows.cuh"

namespace megalite::cuda {
namespace {

template <class T, int kWidth>
struct Forward {
  struct Loaded {
    Vector<T, kWidth> x, residual;
  };
  struct State {
    Wide<T> bias[kWidth];
  };

  const T *x, *bias, *residual;
  T* out;
  int64_t columns;
  DropMask mask;

  __device__ State begin(int64_t vector) const {
    State state;
    load_wide<kWidth>(state.bias, bias == nullptr ? bias : bias + vector * kWidth);
    return state;
  }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    const int64_t at = row * columns + vector * kWidth;
    return {cuda::load<kWidth>(x + at), cuda::load<kWidth>(residual + at)};
  }

  __device__ void apply(State& state, const Loaded& loaded, int64_t row, int64_t vector) const {
    store(
        out + row * columns + vector * kWidth,
        residual_sum(loaded.x, state.bias, loaded.residual, mask, row, vector * kWidth));
  }
};

template <class T, int kWidth>
struct Backward {
  static constexpr int kSums = 1;
  using Loaded = Vector<T, kWidth>;
  struct State {
    Wide<T> sums[kSums][kWidth];
  };

  const T* grad;
  T* x_grad;
  int64_t columns;
  DropMask mask;

  __device__ State begin(int64_t) const { return {}; }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    return cuda::load<kWidth>(grad + row * columns + vector * kWidth);
  }

  __device__ void apply(State& state, const Loaded& loaded, int64_t row, int64_t vector) const {
    Wide<T> result[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) result[i] = loaded[i];
    mask.apply(result, row, vector * kWidth);
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) state.sums[0][i] += result[i];
    store(x_grad + row * columns + vector * kWidth, narrow_all<T>(result));
  }
};

}  // namespace

void bias_dropout_add(
    Dtype dtype, const void* x, const void* bias, const void* residual, void* out, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), x, bias, residual, out), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Forward<T, kWidth> op{
          static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<const T*>(residual), static_cast<T*>(out),
          columns, DropMask::of(site, mask, rows)};
      for_rows(op, rows, columns / kWidth, stream);
    });
  });
}

void bias_dropout_add_backward(
    Dtype dtype, const void* grad, void* x_grad, void* bias_grad, void* workspace, int64_t rows, int64_t columns,
    Site site, Mask mask, cudaStream_t stream) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), grad, x_grad), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Backward<T, kWidth> op{
          static_cast<const T*>(grad), static_cast<T*>(x_grad), columns, DropMask::of(site, mask, rows)};
      sum_rows<T, kWidth>(op, rows, columns, workspace, bias_grad, stream);
    });
  });
}

}  // namespace megalite::cuda
