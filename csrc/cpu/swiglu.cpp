// Bias and SwiGLU on the CPU; see megalite/kernels/activations.py.
#include "contract.h"

#include "../checks.h"
#include "../ops.h"
#include "elementary.h"
#include "rows.h"

namespace megalite::cpu {
namespace {

using torch::stable::Tensor;

// A tensor with the shape of x except for the last dim.
Tensor new_like(const Tensor& x, int64_t columns) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  return torch::stable::new_empty(x, sizes);
}

}  // namespace

Tensor bias_swiglu(const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_swiglu", x, bias, 2);
  const auto input = torch::stable::contiguous(x);
  const int64_t columns = x.size(x.dim() - 1) / 2;
  auto out = new_like(input, columns);
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const auto wide = wide_bias<T>(bias, 2 * columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* added = wide.data();
    for_rows(rows_of(input), columns, [=](int64_t r) MEGALITE_BODY {
      const T* __restrict gates = source + 2 * r * columns;
      const T* __restrict ups = gates + columns;
      T* __restrict to = target + r * columns;
#pragma omp simd
      for (int64_t i = 0; i < columns; ++i) {
        const Wide<T> gate = widen(gates[i]) + added[i], up = widen(ups[i]) + added[columns + i];
        to[i] = narrow<T>(gate * sigmoid_of(gate) * up);
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> bias_swiglu_backward(
    const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_swiglu", x, bias, 2);
  check_gradient("bias_swiglu", grad, x, 2);
  const auto input = torch::stable::contiguous(x), upper = torch::stable::contiguous(grad);
  const int64_t columns = x.size(x.dim() - 1) / 2;
  auto out = torch::stable::new_empty(input, input.sizes());
  auto sums = torch::stable::new_empty(input, {2 * columns});
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const auto wide = wide_bias<T>(bias, 2 * columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    const T* above = static_cast<const T*>(upper.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* added = wide.data();
    const auto span = [=](int64_t r, int64_t column, int64_t count, Wide<T>* sum) MEGALITE_BODY {
      const T* __restrict gates = source + 2 * r * columns + column;
      const T* __restrict ups = gates + columns;
      const T* __restrict from = above + r * columns + column;
      T* __restrict of_gate = target + 2 * r * columns + column;
      T* __restrict of_up = of_gate + columns;
      Wide<T>* __restrict gate_sum = sum + column;
      Wide<T>* __restrict up_sum = gate_sum + columns;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const Wide<T> gate = widen(gates[i]) + added[column + i], up = widen(ups[i]) + added[columns + column + i];
        const Wide<T> e = exp_of(-gate), s = Wide<T>{1} / (Wide<T>{1} + e), y = widen(from[i]);
        // The derivative of g s(g): s + g s (1 - s), with 1 - s computed as e s to avoid cancellation.
        const Wide<T> slope = e == static_cast<Wide<T>>(INFINITY) ? Wide<T>{0} : s + gate * s * s * e;
        const Wide<T> gate_grad = y * up * slope, up_grad = y * gate * s;
        of_gate[i] = narrow<T>(gate_grad);
        of_up[i] = narrow<T>(up_grad);
        gate_sum[i] += gate_grad;
        up_sum[i] += up_grad;
      }
    };
    sum_rows(rows_of(input), columns, 2 * columns, static_cast<T*>(sums.mutable_data_ptr()), span);
  });
  return {out, sums};
}

}  // namespace megalite::cpu
