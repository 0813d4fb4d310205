// Counter-based dropout on the CPU; see megalite/kernels/dropout.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../checks.h"
#include "../ops.h"
#include "dtype.h"
#include "isa.h"
#include "mask.h"

namespace megalite::cpu {
namespace {

constexpr int64_t kGrain = 1 << 15;  // minimum number of elements per thread

// Processes `count` consecutive elements of one sample, starting at index `index` in the sample.
template <class T>
MEGALITE_INLINE void drop_span(
    const T* __restrict x, T* __restrict out, int64_t count, uint64_t index, uint64_t sample, const Mask& mask) {
  const auto scale = static_cast<Wide<T>>(mask.scale);
  const uint32_t threshold = mask.threshold;
  for_words(count, index, sample, mask.key, [&](int64_t at, int num, const uint32_t* words) MEGALITE_BODY {
    for (int i = 0; i < num; ++i) {
      const Wide<T> kept = widen(x[at + i]) * scale;
      out[at + i] = narrow<T>(words[i] >= threshold ? kept : Wide<T>{0});
    }
  });
}

// Processes elements [begin, end) of x, viewed as [outer, num_samples, rest].
template <class T>
void drop_range(
    const T* x, T* out, int64_t begin, int64_t end, int64_t rest, const int64_t* samples, int64_t num_samples,
    int64_t base, int64_t stride, const Mask& mask) {
  run_for_isa([&]() MEGALITE_BODY {
    for (int64_t at = begin; at < end;) {
      const int64_t row = at / rest, column = at % rest;
      const int64_t count = std::min(rest - column, end - at);
      const int64_t index = base + (row / num_samples) * stride + column;
      drop_span(x + at, out + at, count, index, samples[row % num_samples], mask);
      at += count;
    }
  });
}

}  // namespace

torch::stable::Tensor dropout(
    const torch::stable::Tensor& x, const torch::stable::Tensor& sample_numbers, double p, int64_t key,
    int64_t base, int64_t stride) {
  STD_TORCH_CHECK(x.dim() >= 2, "dropout: x must be [outer, b, ...]");
  check_samples("dropout", x, sample_numbers);
  const auto input = torch::stable::contiguous(x);
  const auto samples = torch::stable::contiguous(sample_numbers);
  auto out = torch::stable::new_empty(input, input.sizes());
  const int64_t num_samples = x.size(1), numel = x.numel();
  if (numel == 0) return out;
  const int64_t rest = numel / (x.size(0) * num_samples);
  const Mask mask = mask_of(p, key);
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const auto* numbers = static_cast<const int64_t*>(samples.const_data_ptr());
    torch::stable::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
      drop_range(source, target, begin, end, rest, numbers, num_samples, base, stride, mask);
    });
  });
  return out;
}

}  // namespace megalite::cpu
