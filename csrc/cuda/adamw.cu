// AdamW on a GPU; see megalite/kernels/adamw.py.
#include <cmath>

#include "rows.cuh"

namespace megalite::cuda {
namespace {

// The decay of a moment, computed in fp64: with beta rounded to fp32, 1 - beta loses digits.
template <class W>
struct Moment {
  W beta, rest, log_beta;

  explicit Moment(double beta)
      : beta(static_cast<W>(beta)), rest(static_cast<W>(1.0 - beta)), log_beta(static_cast<W>(std::log(beta))) {}

  __device__ W next(W moment, W value) const { return beta * moment + rest * value; }
  __device__ W bias_correction(W number) const { return -std::expm1(number * log_beta); }  // 1 - beta^number
};

// T is the dtype of the rounded weights; everything else has dtype Wide<T>.
template <class T, int kWidth>
struct Update {
  using W = Wide<T>;
  struct Loaded {
    Vector<W, kWidth> main, exp_avg, exp_avg_sq, gradient;
  };
  struct State {
    bool is_good;
    W divisor, step_size, root;
  };

  W *main, *exp_avg, *exp_avg_sq;
  T* rounded;  // null if no weights are rounded
  const W* gradient;
  Scalars scalars;
  Moment<W> first, second;
  W learning_rate, decay, epsilon;

  __device__ State begin(int64_t) const {
    const W number = *scalars.number;
    const W divisor = scalars.divisor == nullptr ? W{1} : static_cast<W>(*scalars.divisor);
    const W root = std::sqrt(second.bias_correction(number));
    return {*scalars.is_good, divisor, learning_rate / first.bias_correction(number), root};
  }

  __device__ Loaded load(int64_t row, int64_t) const {
    const int64_t at = row * kWidth;
    return {
        cuda::load<kWidth>(main + at), cuda::load<kWidth>(exp_avg + at), cuda::load<kWidth>(exp_avg_sq + at),
        cuda::load<kWidth>(gradient + at)};
  }

  __device__ void apply(const State& state, const Loaded& loaded, int64_t row, int64_t) const {
    if (!state.is_good) return;
    W weight[kWidth], mean[kWidth], variance[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const W divided = loaded.gradient[i] / state.divisor;
      mean[i] = first.next(loaded.exp_avg[i], divided);
      variance[i] = second.next(loaded.exp_avg_sq[i], divided * divided);
      const W denominator = std::sqrt(variance[i]) / state.root + epsilon;
      const W change = decay * loaded.main[i] + state.step_size * mean[i] / denominator;
      weight[i] = loaded.main[i] - change;
    }
    const int64_t at = row * kWidth;
    store(main + at, narrow_all<W>(weight));
    store(exp_avg + at, narrow_all<W>(mean));
    store(exp_avg_sq + at, narrow_all<W>(variance));
    if (rounded != nullptr) store(rounded + at, narrow_all<T>(weight));
  }
};

}  // namespace

void adamw(
    Dtype dtype, void* main, void* exp_avg, void* exp_avg_sq, void* rounded, const void* gradient, int64_t num,
    Rates rates, Scalars scalars, cudaStream_t stream) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    dispatch_width<W>(fits_vectors(num * sizeof(W), main, exp_avg, exp_avg_sq, rounded, gradient), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Update<T, kWidth> op{
          static_cast<W*>(main), static_cast<W*>(exp_avg), static_cast<W*>(exp_avg_sq), static_cast<T*>(rounded),
          static_cast<const W*>(gradient), scalars, Moment<W>(rates.beta1), Moment<W>(rates.beta2),
          static_cast<W>(rates.learning_rate), static_cast<W>(rates.learning_rate * rates.weight_decay),
          static_cast<W>(rates.epsilon)};
      for_rows(op, num / kWidth, 1, stream);  // rows of one vector: neighbouring threads process neighbouring vectors
    });
  });
}

}  // namespace megalite::cuda
