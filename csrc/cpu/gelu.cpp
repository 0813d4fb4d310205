// Bias and GELU (tanh form) on the CPU; see megalite/kernels/activations.py.
#include "contract.h"

#include "../checks.h"
#include "../ops.h"
#include "elementary.h"
#include "rows.h"

namespace megalite::cpu {
namespace {

using torch::stable::Tensor;

constexpr double kTwiceSqrt2OverPi = 1.59576912160573071176;
constexpr double kCubic = 0.044715;

// x (1 + tanh(u)) / 2 = x sigmoid(2u), which has no cancellation where tanh is near -1.
template <class Real>
MEGALITE_INLINE Real gate_of(Real x) {
  return sigmoid_of(static_cast<Real>(kTwiceSqrt2OverPi) * x * (Real{1} + static_cast<Real>(kCubic) * x * x));
}

// The derivative of x s(2u): s + x s (1 - s) (2u)'. 1 - s is e s, without the cancellation where s is near 1.
template <class Real>
MEGALITE_INLINE Real slope_of(Real x) {
  const Real square = x * x;
  const Real doubled = static_cast<Real>(kTwiceSqrt2OverPi) * x * (Real{1} + static_cast<Real>(kCubic) * square);
  const Real inner = static_cast<Real>(kTwiceSqrt2OverPi) * (Real{1} + static_cast<Real>(3 * kCubic) * square);
  const Real e = exp_of(-doubled), gate = Real{1} / (Real{1} + e);
  const bool is_flat = e == Real{0} || e == static_cast<Real>(INFINITY);  // `inner` may be infinite here
  return gate + (is_flat ? Real{0} : x * gate * gate * e * inner);
}

}  // namespace

Tensor bias_gelu(const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_gelu", x, bias, 1);
  const auto input = torch::stable::contiguous(x);
  auto out = torch::stable::new_empty(input, input.sizes());
  const int64_t columns = x.size(x.dim() - 1);
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const auto wide = wide_bias<T>(bias, columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* added = wide.data();
    for_rows(rows_of(input), columns, [=](int64_t r) MEGALITE_BODY {
      const T* __restrict from = source + r * columns;
      T* __restrict to = target + r * columns;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        const Wide<T> value = widen(from[i]) + added[i];
        to[i] = narrow<T>(value * gate_of(value));
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(
    const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_gelu", x, bias, 1);
  check_gradient("bias_gelu", grad, x);
  const auto input = torch::stable::contiguous(x);
  const auto upper = torch::stable::contiguous(grad);
  const int64_t columns = x.size(x.dim() - 1);
  auto out = torch::stable::new_empty(input, input.sizes());
  auto sums = torch::stable::new_empty(input, {columns});
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const auto wide = wide_bias<T>(bias, columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    const T* above = static_cast<const T*>(upper.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* added = wide.data();
    sum_rows(
        rows_of(input), columns, columns, static_cast<T*>(sums.mutable_data_ptr()),
        [=](int64_t r, int64_t column, int64_t count, Wide<T>* __restrict sum) MEGALITE_BODY {
          const int64_t first = r * columns + column;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) {
            const Wide<T> value = widen(source[first + i]) + added[column + i];
            const Wide<T> result = widen(above[first + i]) * slope_of(value);
            target[first + i] = narrow<T>(result);
            sum[column + i] += result;
          }
        });
  });
  return {out, sums};
}

}  // namespace megalite::cpu
