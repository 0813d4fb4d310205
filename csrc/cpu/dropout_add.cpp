// Bias, dropout and residual add on the CPU; see megalite/kernels/dropout.py.
#include "../checks.h"
#include "../ops.h"
#include "mask.h"
#include "rows.h"

namespace megalite::cpu {
namespace {

using torch::stable::Tensor;

// The position of a row's elements in their sample.
struct Site {
  const int64_t* samples;
  int64_t num_samples, columns, base;

  MEGALITE_INLINE uint64_t index(int64_t row) const { return base + row / num_samples * columns; }
  MEGALITE_INLINE uint64_t sample(int64_t row) const { return samples[row % num_samples]; }
};

}  // namespace

Tensor bias_dropout_add(
    const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual, const Tensor& sample_numbers,
    double p, int64_t key, int64_t base) {
  check_hidden("bias_dropout_add", x, sample_numbers);
  const int64_t columns = x.size(2);
  check_residual("bias_dropout_add", x, residual);
  check_bias("bias_dropout_add", x, bias);
  const auto input = torch::stable::contiguous(x);
  const auto before = torch::stable::contiguous(residual);
  auto out = torch::stable::new_empty(input, input.sizes());
  const Mask mask = mask_of(p, key);
  const auto samples = torch::stable::contiguous(sample_numbers);
  const Site site{static_cast<const int64_t*>(samples.const_data_ptr()), x.size(1), columns, base};
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const auto wide = wide_bias<T>(bias, columns);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    const T* stream = static_cast<const T*>(before.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* added = wide.data();
    for_rows(rows_of(input), columns, [=](int64_t r) MEGALITE_BODY {
      const T* __restrict from = source + r * columns;
      const T* __restrict old = stream + r * columns;
      T* __restrict to = target + r * columns;
      const auto scale = static_cast<Wide<T>>(mask.scale);
      const uint32_t threshold = mask.threshold;
      if (threshold == 0) {  // all elements are kept unscaled
        for (int64_t i = 0; i < columns; ++i) to[i] = narrow<T>(widen(old[i]) + (widen(from[i]) + added[i]));
        return;
      }
      const auto piece = [&](int64_t at, int num, const uint32_t* words) MEGALITE_BODY {
        for (int i = 0; i < num; ++i) {
          const Wide<T> kept = (widen(from[at + i]) + added[at + i]) * scale;
          to[at + i] = narrow<T>(widen(old[at + i]) + (words[i] >= threshold ? kept : Wide<T>{0}));
        }
      };
      for_words(columns, site.index(r), site.sample(r), mask.key, piece);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(
    const Tensor& grad, const Tensor& sample_numbers, double p, int64_t key, int64_t base) {
  check_hidden("bias_dropout_add", grad, sample_numbers);
  const auto upper = torch::stable::contiguous(grad);
  const int64_t columns = grad.size(2);
  auto out = torch::stable::new_empty(upper, upper.sizes());
  auto sums = torch::stable::new_empty(upper, {columns});
  const Mask mask = mask_of(p, key);
  const auto samples = torch::stable::contiguous(sample_numbers);
  const Site site{static_cast<const int64_t*>(samples.const_data_ptr()), grad.size(1), columns, base};
  dispatch_floating(upper, [&](auto element) {
    using T = decltype(element);
    const T* above = static_cast<const T*>(upper.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto span = [=](int64_t r, int64_t column, int64_t count, Wide<T>* __restrict sum) MEGALITE_BODY {
      const T* __restrict from = above + r * columns + column;
      T* __restrict to = target + r * columns + column;
      const auto scale = static_cast<Wide<T>>(mask.scale);
      const uint32_t threshold = mask.threshold;
      const auto piece = [&](int64_t at, int num, const uint32_t* words) MEGALITE_BODY {
        for (int i = 0; i < num; ++i) {
          const Wide<T> kept = words[i] >= threshold ? widen(from[at + i]) * scale : Wide<T>{0};
          to[at + i] = narrow<T>(kept);
          sum[column + at + i] += kept;
        }
      };
      for_words(count, site.index(r) + column, site.sample(r), mask.key, piece);
    };
    sum_rows(rows_of(upper), columns, columns, static_cast<T*>(sums.mutable_data_ptr()), span);
  });
  return {out, sums};
}

}  // namespace megalite::cpu
