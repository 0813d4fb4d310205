// Random words of many blocks at a time, with the processor's widest instructions.
#pragma once

#include <cstdint>

namespace megalite::cpu {

constexpr int kBlocksAtOnce = 8;

// Generates the same words as random_words of philox.h, but in whole groups of kBlocksAtOnce blocks. `words` is aligned
// to 64 bytes and must be large enough for whole groups.
void fill_words(uint32_t* words, uint64_t first_block, int num_blocks, uint64_t sample, uint64_t key);

}  // namespace megalite::cpu
