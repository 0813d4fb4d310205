// Bias and SwiGLU on a GPU; see megalite/kernels/activations.py.
#include "elementary.cuh"
#include "rows.cuh"

namespace megalite::cuda {
namespace {

// A thread has the same columns of both halves: `columns` is the width of one half.
template <class T, int kWidth>
struct Halves {
  Vector<T, kWidth> gate, up;
};

template <class T, int kWidth>
struct HalfBiases {
  Wide<T> gate[kWidth], up[kWidth];

  __device__ static HalfBiases of(const T* bias, int64_t first, int64_t columns) {
    HalfBiases biases;
    load_wide<kWidth>(biases.gate, bias == nullptr ? bias : bias + first);
    load_wide<kWidth>(biases.up, bias == nullptr ? bias : bias + columns + first);
    return biases;
  }
};

template <class T, int kWidth>
__device__ __forceinline__ Halves<T, kWidth> load_halves(const T* x, int64_t row, int64_t first, int64_t columns) {
  const T* from = x + 2 * row * columns + first;
  return {load<kWidth>(from), load<kWidth>(from + columns)};
}

template <class T, int kWidth>
struct Forward {
  using Loaded = Halves<T, kWidth>;
  using State = HalfBiases<T, kWidth>;

  const T *x, *bias;
  T* out;
  int64_t columns;

  __device__ State begin(int64_t vector) const { return State::of(bias, vector * kWidth, columns); }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    return load_halves<T, kWidth>(x, row, vector * kWidth, columns);
  }

  __device__ void apply(State& state, const Loaded& loaded, int64_t row, int64_t vector) const {
    Wide<T> result[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const Wide<T> gate = loaded.gate[i] + state.gate[i], up = loaded.up[i] + state.up[i];
      result[i] = gate * inverse_for<T>(Wide<T>{1} + exp_for<T>(-gate)) * up;
    }
    store(out + row * columns + vector * kWidth, narrow_all<T>(result));
  }
};

template <class T, int kWidth>
struct Backward {
  static constexpr int kSums = 2;
  struct Loaded {
    Vector<T, kWidth> grad;
    Halves<T, kWidth> x;
  };
  struct State {
    HalfBiases<T, kWidth> bias;
    Wide<T> sums[kSums][kWidth];
  };

  const T *grad, *x, *bias;
  T* x_grad;
  int64_t columns;

  __device__ State begin(int64_t vector) const {
    return {HalfBiases<T, kWidth>::of(bias, vector * kWidth, columns), {}};
  }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    const int64_t first = vector * kWidth;
    return {cuda::load<kWidth>(grad + row * columns + first), load_halves<T, kWidth>(x, row, first, columns)};
  }

  __device__ void apply(State& state, const Loaded& loaded, int64_t row, int64_t vector) const {
    Wide<T> gates[kWidth], ups[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const Wide<T> gate = loaded.x.gate[i] + state.bias.gate[i];
      const Wide<T> up = loaded.x.up[i] + state.bias.up[i], y = loaded.grad[i];
      const Wide<T> e = exp_for<T>(-gate), s = inverse_for<T>(Wide<T>{1} + e);
      // The derivative of g s(g): s + g s (1 - s), with 1 - s computed as e s to avoid cancellation.
      const Wide<T> slope = e == static_cast<Wide<T>>(INFINITY) ? Wide<T>{0} : s + gate * s * (e * s);
      const Wide<T> gate_grad = y * up * slope, up_grad = y * gate * s;
      gates[i] = gate_grad;
      ups[i] = up_grad;
      state.sums[0][i] += gate_grad;
      state.sums[1][i] += up_grad;
    }
    T* to = x_grad + 2 * row * columns + vector * kWidth;
    store(to, narrow_all<T>(gates));
    store(to + columns, narrow_all<T>(ups));
  }
};

}  // namespace

void bias_swiglu(
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

void bias_swiglu_backward(
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
