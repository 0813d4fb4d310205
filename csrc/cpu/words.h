// Random words of many blocks at a time, with the widest instructions that the processor has.
#pragma once

#include <cstdint>

namespace megalite::cpu {

constexpr int kBlocksAtOnce = 8;

// As random_words of philox.h, and the same words, but in whole groups of kBlocksAtOnce blocks: `words`, aligned to 64
// bytes, must be large enough for them.
void fill_words(uint32_t* words, uint64_t first_block, int num_blocks, uint64_t sample, uint64_t key);

}  // namespace megalite::cpu
