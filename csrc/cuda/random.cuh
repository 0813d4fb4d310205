// Random words of neighbouring elements, and the position of a row's elements in their sample.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "../philox.h"
#include "launch.h"

namespace megalite::cuda {

// The keys of each round, computed by the host: as kernel parameters they are operands that cost no instruction.
struct Rounds {
  uint32_t key0[kRounds], key1[kRounds];

  static Rounds of(uint64_t key) {
    Rounds rounds;
    for (uint32_t round = 0; round < kRounds; ++round) {
      rounds.key0[round] = static_cast<uint32_t>(key) + round * kKeyStep0;
      rounds.key1[round] = static_cast<uint32_t>(key >> 32) + round * kKeyStep1;
    }
    return rounds;
  }
};

__device__ __forceinline__ void words_of_block(
    uint32_t* words, uint64_t block, uint64_t sample, const Rounds& rounds) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(sample), c3 = static_cast<uint32_t>(sample >> 32);
  MEGALITE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    philox_round(c0, c1, c2, c3, rounds.key0[round], rounds.key1[round]);
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// The words of the elements index, index + 1, ... of a sample. A Philox block has four words, so an index divisible by
// four costs a quarter of any other.
template <int kCount>
__device__ __forceinline__ void words_at(
    uint32_t (&words)[kCount], uint64_t index, uint64_t sample, const Rounds& rounds) {
  if (kCount % kWordsPerBlock == 0 && index % kWordsPerBlock == 0) {
    MEGALITE_UNROLL
    for (int i = 0; i + kWordsPerBlock <= kCount; i += kWordsPerBlock) {
      words_of_block(words + i, (index + i) / kWordsPerBlock, sample, rounds);
    }
    return;
  }
  constexpr int kBlocks = (kCount + 2 * kWordsPerBlock - 2) / kWordsPerBlock;  // most blocks for kCount elements
  uint32_t blocks[kBlocks * kWordsPerBlock];
  MEGALITE_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    words_of_block(blocks + i * kWordsPerBlock, index / kWordsPerBlock + i, sample, rounds);
  }
  const auto shift = static_cast<unsigned>(index % kWordsPerBlock);
  MEGALITE_UNROLL
  for (int i = 0; i < kCount; ++i) {  // an index known only at run time would move the words to local memory
    const uint32_t even = shift & 2 ? blocks[i + 2] : blocks[i], odd = shift & 2 ? blocks[i + 3] : blocks[i + 1];
    words[i] = shift & 1 ? odd : even;
  }
}

struct Position {
  uint64_t index, sample;
};

// A Site that divides by num_samples with a multiplication and a shift. This is exact for rows and divisors below 2^31,
// because 2^shift is at least 2^31 times the divisor, and the factor exceeds 2^shift / divisor by less than 1.
struct Places {
  Site site;
  uint32_t factor, shift;

  static Places of(const Site& site, int64_t rows) {
    if (std::max(rows, site.num_samples) > INT32_MAX) throw std::runtime_error("too many rows for a CUDA kernel");
    const uint64_t divisor = std::max<int64_t>(site.num_samples, 1);
    uint32_t shift = 31;
    while ((uint64_t{1} << (shift - 31)) < divisor) ++shift;
    return {site, static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor), shift};
  }
};

// The position of the first element of a row.
__device__ __forceinline__ Position position_of(const Places& places, int64_t row) {
  const Site& site = places.site;
  const auto outer = static_cast<int64_t>(static_cast<uint64_t>(row) * places.factor >> places.shift);
  const int64_t sample = site.samples[row - outer * site.num_samples];
  return {static_cast<uint64_t>(site.base + outer * site.stride), static_cast<uint64_t>(sample)};
}

// The dropout settings of a tensor of rows.
struct DropMask {
  Places places;
  Mask mask;
  Rounds rounds;

  static DropMask of(const Site& site, const Mask& mask, int64_t rows) {
    return {Places::of(site, rows), mask, Rounds::of(mask.key)};
  }

  // Drops some of a row's neighbouring elements from `column` on and scales the others.
  template <int kCount, class W>
  __device__ __forceinline__ void apply(W (&values)[kCount], int64_t row, int64_t column) const {
    if (mask.threshold == 0) return;  // all elements are kept unscaled
    const Position position = position_of(places, row);
    const auto scale = static_cast<W>(mask.scale);
    uint32_t words[kCount];
    words_at(words, position.index + column, position.sample, rounds);
    MEGALITE_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = words[i] >= mask.threshold ? values[i] * scale : W{0};
  }
};

}  // namespace megalite::cuda
