// RMSNorm on the CPU; see megalite/kernels/norm.py.
#include "contract.h"

#include <cmath>

#include "../ops.h"
#include "../row_checks.h"
#include "rows.h"
#include "sums.h"

namespace megalite::cpu {
namespace {

using torch::stable::Tensor;

// The scale factor of a row.
template <class T>
MEGALITE_INLINE Wide<T> inverse_root(const T* __restrict x, int64_t columns, double epsilon) {
  using W = Wide<T>;
  const W squares = sum_of<W>(columns, [=](int64_t i) MEGALITE_BODY { return widen(x[i]) * widen(x[i]); });
  return W{1} / std::sqrt(squares / static_cast<W>(columns) + static_cast<W>(epsilon));
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  check_norm(x, weight);
  const auto input = torch::stable::contiguous(x);
  const int64_t columns = x.size(x.dim() - 1);
  auto out = torch::stable::new_empty(input, input.sizes());
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const auto wide = wide_bias<T>(weight, columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* weights = wide.data();
    for_rows(rows_of(input), columns, [=](int64_t r) MEGALITE_BODY {
      const T* __restrict from = source + r * columns;
      T* __restrict to = target + r * columns;
      const Wide<T> inverse = inverse_root(from, columns, epsilon);
      for (int64_t i = 0; i < columns; ++i) to[i] = narrow<T>(widen(from[i]) * inverse * weights[i]);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, double epsilon,
    const std::optional<Tensor>& residual_grad) {
  check_norm(x, weight);
  check_gradient("rms_norm", grad, x);
  if (residual_grad) check_gradient("rms_norm", *residual_grad, x);
  const auto added = residual_grad ? std::optional<Tensor>(torch::stable::contiguous(*residual_grad)) : std::nullopt;
  const auto input = torch::stable::contiguous(x), upper = torch::stable::contiguous(grad);
  const int64_t columns = x.size(x.dim() - 1);
  auto out = torch::stable::new_empty(input, input.sizes());
  auto sums = torch::stable::new_empty(input, {columns});
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const auto wide = wide_bias<T>(weight, columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    const T* above = static_cast<const T*>(upper.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const W* weights = wide.data();
    const T* residual = added ? static_cast<const T*>(added->const_data_ptr()) : nullptr;
    const auto whole_row = [=](int64_t r, int64_t, int64_t, W* __restrict sum) MEGALITE_BODY {
      const T* __restrict from = source + r * columns;
      const T* __restrict g = above + r * columns;
      T* __restrict to = target + r * columns;
      const W inverse = inverse_root(from, columns, epsilon);
      // The component of the gradient along the row: a step along it does not change the norm's output.
      const W along = sum_of<W>(columns, [=](int64_t i) MEGALITE_BODY {
        return widen(g[i]) * weights[i] * (widen(from[i]) * inverse);
      }) / static_cast<W>(columns);
      const auto write = [=](const auto& beside) MEGALITE_BODY {
        for (int64_t i = 0; i < columns; ++i) {
          const W normal = widen(from[i]) * inverse, y = widen(g[i]);
          to[i] = narrow<T>(inverse * (y * weights[i] - normal * along) + beside(i));
          sum[i] += y * normal;
        }
      };
      if (residual == nullptr) return write([](int64_t) MEGALITE_BODY { return W{0}; });
      const T* __restrict other = residual + r * columns;
      write([=](int64_t i) MEGALITE_BODY { return widen(other[i]); });
    };
    sum_rows(rows_of(input), columns, columns, static_cast<T*>(sums.mutable_data_ptr()), whole_row, columns);
  });
  return {out, sums};
}

}  // namespace megalite::cpu
