// A dropout's mask, made where it is used: what it depends on is told in megalite/kernels/dropout.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../philox.h"

namespace megalite::cpu {

struct Mask {
  uint64_t key;
  uint32_t threshold;  // an element is kept if its random word is at least this
  double scale;
};

inline Mask mask_of(double p, int64_t key) {
  const double threshold = std::min(std::nearbyint(p * 0x1p32), 0x1p32 - 1.0);
  return {static_cast<uint64_t>(key), static_cast<uint32_t>(threshold), 1.0 / (1.0 - p)};
}

// Calls `piece(at, num, words)` with the random words of the elements at, at + 1, ... at + num - 1 of a span: `count`
// consecutive elements of one sample, the first of which has the index `index` there.
template <class Piece>
MEGALITE_INLINE void for_words(int64_t count, uint64_t index, uint64_t sample, uint64_t key, const Piece& piece) {
  constexpr int kPieceWords = 512;  // they stay in the first-level cache
  alignas(64) uint32_t words[kPieceWords];
  for (int64_t at = 0; at < count;) {
    const int skip = static_cast<int>(index % kWordsPerBlock);
    const int num = static_cast<int>(std::min<int64_t>(count - at, kPieceWords - skip));
    const int num_blocks = (skip + num + kWordsPerBlock - 1) / kWordsPerBlock;
    random_words(words, index / kWordsPerBlock, num_blocks, sample, key);
    piece(at, num, words + skip);
    at += num, index += num;
  }
}

}  // namespace megalite::cpu
