// A dropout mask, computed where it is used; see megalite/kernels/dropout.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../mask.h"
#include "../philox.h"
#include "words.h"

namespace megalite::cpu {

// Calls `piece(at, num, words)` with the random words of the elements at, at + 1, ... at + num - 1 of a span: `count`
// consecutive elements of one sample, starting at index `index` in the sample.
template <class Piece>
MEGALITE_INLINE void for_words(int64_t count, uint64_t index, uint64_t sample, uint64_t key, const Piece& piece) {
  constexpr int kPieceWords = 512;  // fits into the first-level cache
  static_assert(kPieceWords % (kBlocksAtOnce * kWordsPerBlock) == 0);
  alignas(64) uint32_t words[kPieceWords];
  for (int64_t at = 0; at < count;) {
    const int skip = static_cast<int>(index % kWordsPerBlock);
    const int num = static_cast<int>(std::min<int64_t>(count - at, kPieceWords - skip));
    const int num_blocks = (skip + num + kWordsPerBlock - 1) / kWordsPerBlock;
    fill_words(words, index / kWordsPerBlock, num_blocks, sample, key);
    piece(at, num, words + skip);
    at += num, index += num;
  }
}

}  // namespace megalite::cpu
