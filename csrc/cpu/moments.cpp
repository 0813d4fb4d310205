// Random rounding of Adam's moments on the CPU; see megalite/kernels/moments.py.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "../element.h"
#include "../ops.h"
#include "../philox.h"
#include "isa.h"
#include "words.h"

namespace megalite::cpu {
namespace {

constexpr int kPieceWords = 512;     // random words generated at a time: fits into the first-level cache
constexpr int64_t kGrain = 1 << 13;  // minimum number of elements per thread
constexpr uint32_t kShift = 120u << 23;

MEGALITE_INLINE uint16_t to_bf16(float value, uint32_t word) {
  return static_cast<uint16_t>((bits_of(value) + word) >> 16);
}

MEGALITE_INLINE uint8_t to_e4m3(float value, uint32_t word) {
  const float size = std::fabs(value);
  const int32_t small = static_cast<int32_t>((size < 0x1p-6f ? size : 0.0f) * 0x1p29f);
  const uint32_t magnitude = size < 0x1p-6f ? static_cast<uint32_t>(small) : bits_of(size) - kShift;
  return static_cast<uint8_t>(((magnitude + (word << 4)) >> 20) | ((bits_of(value) >> 24) & 0x80u));
}

// Where the moments of a call are read and written; outputs are null if they are skipped.
struct Moments {
  const float *exp_avg, *exp_avg_sq;
  uint16_t* rounded_bf16;
  uint8_t* rounded_e4m3;
  uint16_t* rounded_sq;
};

MEGALITE_INLINE void round_piece(const Moments& to, int64_t at, int count, const uint32_t* __restrict words) {
  const float *avg = to.exp_avg + at, *sq = to.exp_avg_sq + at;
  if (to.rounded_sq != nullptr) {
    for (int i = 0; i < count; ++i) to.rounded_sq[at + i] = to_bf16(sq[i], words[i] & 0xFFFFu);
  }
  if (to.rounded_bf16 != nullptr) {
    for (int i = 0; i < count; ++i) to.rounded_bf16[at + i] = to_bf16(avg[i], words[i] >> 16);
  }
  if (to.rounded_e4m3 != nullptr) {
    for (int i = 0; i < count; ++i) {
      const uint32_t stored = to.rounded_sq != nullptr ? uint32_t{to.rounded_sq[at + i]} << 16 : bits_of(sq[i]);
      const int32_t exponent = ((static_cast<int32_t>(stored >> 23) - 127) >> 1) - 3;
      const float scaled = avg[i] * float_of(static_cast<uint32_t>(127 - exponent) << 23);
      to.rounded_e4m3[at + i] = to_e4m3(std::min(std::max(scaled, -448.0f), 448.0f), words[i] >> 16);
    }
  }
}

template <class T>
T* data_or_null(const std::optional<torch::stable::Tensor>& tensor, bool has_type) {
  return has_type ? static_cast<T*>(tensor->mutable_data_ptr()) : nullptr;
}

}  // namespace

void round_moments_(
    const torch::stable::Tensor& exp_avg, const torch::stable::Tensor& exp_avg_sq,
    const std::optional<torch::stable::Tensor>& rounded, const std::optional<torch::stable::Tensor>& rounded_sq,
    const torch::stable::Tensor& number, int64_t key, int64_t base, int64_t first, int64_t run_length,
    int64_t run_stride) {
  using torch::headeronly::ScalarType;
  const auto fits = [&](const torch::stable::Tensor& tensor) {
    return tensor.is_contiguous() && tensor.numel() == exp_avg.numel();
  };
  STD_TORCH_CHECK(
      fits(exp_avg) && fits(exp_avg_sq) && (!rounded || fits(*rounded)) && (!rounded_sq || fits(*rounded_sq)),
      "round_moments_: tensors must be contiguous and of equal size");
  STD_TORCH_CHECK(
      exp_avg.scalar_type() == ScalarType::Float && exp_avg_sq.scalar_type() == ScalarType::Float &&
          number.scalar_type() == ScalarType::Float && run_length > 0,
      "round_moments_: moments and number must be in fp32, and run_length positive");
  const bool is_bf16 = rounded && rounded->scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(
      (!rounded || is_bf16 || rounded->scalar_type() == ScalarType::Float8_e4m3fn) &&
          (!rounded_sq || rounded_sq->scalar_type() == ScalarType::BFloat16),
      "round_moments_: rounded must be in bf16 or float8_e4m3fn, and rounded_sq in bf16");
  const Moments to{
      static_cast<const float*>(exp_avg.const_data_ptr()), static_cast<const float*>(exp_avg_sq.const_data_ptr()),
      data_or_null<uint16_t>(rounded, is_bf16), data_or_null<uint8_t>(rounded, rounded && !is_bf16),
      data_or_null<uint16_t>(rounded_sq, rounded_sq.has_value())};
  const auto update = static_cast<uint64_t>(*static_cast<const float*>(number.const_data_ptr()));
  torch::stable::parallel_for(0, exp_avg.numel(), kGrain, [&](int64_t begin, int64_t end) {
    run_for_isa([&]() MEGALITE_BODY {
      alignas(64) uint32_t words[kPieceWords + kBlocksAtOnce * kWordsPerBlock];
      for (int64_t at = begin; at < end;) {
        const int64_t run = (first + at) / run_length, offset = (first + at) % run_length;
        const uint64_t index = static_cast<uint64_t>(base + run * run_stride + offset);
        const int skip = static_cast<int>(index % kWordsPerBlock);
        const int64_t left = std::min(run_length - offset, end - at);
        const int count = static_cast<int>(std::min<int64_t>(left, kPieceWords - skip));
        const int num_blocks = (skip + count + kWordsPerBlock - 1) / kWordsPerBlock;
        fill_words(words, index / kWordsPerBlock, num_blocks, update, static_cast<uint64_t>(key));
        round_piece(to, at, count, words + skip);
        at += count;
      }
    });
  });
}

}  // namespace megalite::cpu
