// Random words of neighbouring elements, and where a row's elements stand in their sample.
#pragma once

#include <cuda_runtime.h>

#include "../philox.h"
#include "launch.h"

namespace megalite::cuda {

// The words of the elements index, index + 1, ... of a sample: a block of Philox makes four, so that an index divisible
// by four costs a quarter of another.
template <int kCount>
__device__ __forceinline__ void words_at(uint32_t (&words)[kCount], uint64_t index, uint64_t sample, uint64_t key) {
  if (kCount % kWordsPerBlock == 0 && index % kWordsPerBlock == 0) {
    MEGALITE_UNROLL
    for (int i = 0; i + kWordsPerBlock <= kCount; i += kWordsPerBlock) {
      random_words(words + i, (index + i) / kWordsPerBlock, 1, sample, key);
    }
    return;
  }
  constexpr int kBlocks = (kCount + 2 * kWordsPerBlock - 2) / kWordsPerBlock;  // that kCount elements may lie in
  uint32_t blocks[kBlocks * kWordsPerBlock];
  MEGALITE_UNROLL
  for (int i = 0; i < kBlocks; ++i) {
    random_words(blocks + i * kWordsPerBlock, index / kWordsPerBlock + i, 1, sample, key);
  }
  const auto shift = static_cast<unsigned>(index % kWordsPerBlock);
  MEGALITE_UNROLL
  for (int i = 0; i < kCount; ++i) {  // picked without an index, which would move them to local memory
    const uint32_t even = shift & 2 ? blocks[i + 2] : blocks[i], odd = shift & 2 ? blocks[i + 3] : blocks[i + 1];
    words[i] = shift & 1 ? odd : even;
  }
}

struct Position {
  uint64_t index, sample;
};

// Of the first element of a row. Division of 64 bits takes a GPU several times as long as one of 32.
__device__ __forceinline__ Position position_of(const Site& site, int64_t row) {
  int64_t outer;
  if (static_cast<uint64_t>(row | site.num_samples) >> 32 == 0) {
    outer = static_cast<uint32_t>(row) / static_cast<uint32_t>(site.num_samples);
  } else {
    outer = row / site.num_samples;
  }
  const int64_t sample = site.samples[row - outer * site.num_samples];
  return {static_cast<uint64_t>(site.base + outer * site.stride), static_cast<uint64_t>(sample)};
}

}  // namespace megalite::cuda
