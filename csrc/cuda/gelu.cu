// Bias and GELU (tanh form) on a GPU; see megalite/kernels/activations.py.
#include "elementary.cuh"
#include "rows.cuh"

namespace megalite::cuda {
namespace {

constexpr double kTwiceSqrt2OverPi = 1.59576912160573071176;
constexpr double kCubic = 0.044715;

// x (1 + tanh(u)) / 2 = x sigmoid(2u), which has no cancellation where tanh is near -1.
template <class W>
__device__ __forceinline__ W doubled_of(W x) {
  const W factor = multiply_add(static_cast<W>(kCubic) * x, x, W{1});
  return static_cast<W>(kTwiceSqrt2OverPi) * x * factor;
}

template <class T>
__device__ __forceinline__ Wide<T> gelu_of(Wide<T> x) {
  return x * inverse_for<T>(Wide<T>{1} + exp_for<T>(-doubled_of(x)));
}

// The derivative of x s(2u): s + x s (1 - s) (2u)'. 1 - s is e s, without the cancellation where s is near 1.
template <class T>
__device__ __forceinline__ Wide<T> slope_of(Wide<T> x) {
  using W = Wide<T>;
  const W e = exp_for<T>(-doubled_of(x)), gate = inverse_for<T>(W{1} + e);
  const W inner = static_cast<W>(kTwiceSqrt2OverPi) * multiply_add(static_cast<W>(3 * kCubic) * x, x, W{1});
  const bool is_flat = e == W{0} || e == static_cast<W>(INFINITY);  // `inner` may be infinite here
  return gate + (is_flat ? W{0} : x * gate * (gate * e) * inner);
}

template <class T, int kWidth>
struct Forward {
  using Loaded = Vector<T, kWidth>;
  struct State {
    Wide<T> bias[kWidth];
  };

  const T *x, *bias;
  T* out;
  int64_t columns;

  __device__ State begin(int64_t vector) const {
    State state;
    load_wide<kWidth>(state.bias, bias == nullptr ? bias : bias + vector * kWidth);
    return state;
  }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    return cuda::load<kWidth>(x + row * columns + vector * kWidth);
  }

  __device__ void apply(State& state, const Loaded& loaded, int64_t row, int64_t vector) const {
    Wide<T> result[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) result[i] = gelu_of<T>(loaded[i] + state.bias[i]);
    store(out + row * columns + vector * kWidth, narrow_all<T>(result));
  }
};

template <class T, int kWidth>
struct Backward {
  static constexpr int kSums = 1;
  struct Loaded {
    Vector<T, kWidth> grad, x;
  };
  struct State {
    Wide<T> bias[kWidth], sums[kSums][kWidth];
  };

  const T *grad, *x, *bias;
  T* x_grad;
  int64_t columns;

  __device__ State begin(int64_t vector) const {
    State state = {};
    load_wide<kWidth>(state.bias, bias == nullptr ? bias : bias + vector * kWidth);
    return state;
  }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    const int64_t at = row * columns + vector * kWidth;
    return {cuda::load<kWidth>(grad + at), cuda::load<kWidth>(x + at)};
  }

  __device__ void apply(State& state, const Loaded& loaded, int64_t row, int64_t vector) const {
    Wide<T> result[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const Wide<T> slope = slope_of<T>(loaded.x[i] + state.bias[i]);
      const Wide<T> value = loaded.grad[i] * slope;
      result[i] = value;
      state.sums[0][i] += value;
    }
    store(x_grad + row * columns + vector * kWidth, narrow_all<T>(result));
  }
};

}  // namespace

void bias_gelu(
    Dtype dtype, const void* x, const void* bias, void* out, int64_t rows, int64_t columns, cudaStream_t stream) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), x, bias, out), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Forward<T, kWidth> op{
          static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out), columns};
      for_rows(op, rows, columns / kWidth, stream);
    });
  });
}

void bias_gelu_backward(
    Dtype dtype, const void* grad, const void* x, const void* bias, void* x_grad, void* bias_grad, void* workspace,
    int64_t rows, int64_t columns, cudaStream_t stream) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), grad, x, bias, x_grad), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Backward<T, kWidth> op{
          static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(x_grad),
          columns};
      sum_rows<T, kWidth>(op, rows, columns, workspace, bias_grad, stream);
    });
  });
}

}  // namespace megalite::cuda
