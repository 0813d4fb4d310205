// Dropout by counter on the CPU; what it computes is told in megalite/kernels/dropout.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>

#include "../ops.h"
#include "dtype.h"
#include "isa.h"

namespace megalite::cpu {
namespace {

constexpr int kPieceWords = 512;     // random words made at a time: they stay in the first-level cache
constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread

struct Mask {
  uint64_t key;
  uint32_t threshold;
  double scale;
};

// `count` consecutive elements of one sample, the first of which has the index `index` there.
template <class T>
MEGALITE_INLINE void drop_span(
    const T* __restrict x, T* __restrict out, int64_t count, uint64_t index, uint64_t sample, const Mask& mask) {
  alignas(64) uint32_t words[kPieceWords];
  const auto scale = static_cast<Wide<T>>(mask.scale);
  const uint32_t threshold = mask.threshold;
  while (count > 0) {
    const int skip = static_cast<int>(index % kWordsPerBlock);
    const int num = static_cast<int>(std::min<int64_t>(count, kPieceWords - skip));
    const int num_blocks = (skip + num + kWordsPerBlock - 1) / kWordsPerBlock;
    random_words(words, index / kWordsPerBlock, num_blocks, sample, mask.key);
    for (int i = 0; i < num; ++i) {
      const Wide<T> kept = widen(x[i]) * scale;
      out[i] = narrow<T>(words[skip + i] >= threshold ? kept : Wide<T>{0});
    }
    x += num, out += num, index += num, count -= num;
  }
}

// Elements [begin, end) of x seen as [outer, num_samples, rest].
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
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(x.dim() >= 2, "dropout: x must be [outer, b, ...]");
  STD_TORCH_CHECK(
      sample_numbers.is_cpu() && sample_numbers.scalar_type() == ScalarType::Long &&
          sample_numbers.dim() == 1 && sample_numbers.numel() == x.size(1),
      "dropout: sample_numbers must be int64 [b] on the CPU");
  const auto input = torch::stable::contiguous(x);
  const auto samples = torch::stable::contiguous(sample_numbers);
  auto out = torch::stable::new_empty(input, input.sizes());
  const int64_t num_samples = x.size(1), numel = x.numel();
  if (numel == 0) return out;
  const int64_t rest = numel / (x.size(0) * num_samples);
  const double threshold = std::min(std::nearbyint(p * 0x1p32), 0x1p32 - 1.0);
  const Mask mask{static_cast<uint64_t>(key), static_cast<uint32_t>(threshold), 1.0 / (1.0 - p)};
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
