// Hand-written Philox for x86-64, because compilers generate more shuffles than multiplications. A block's four words
// are in the low halves of four registers' 64-bit lanes, where a multiplication reads them and writes its product. The
// high halves are never read.
#include "words.h"

#include "../philox.h"
#include "isa.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace megalite::cpu {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)

constexpr long long kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kKeyStep0 = 0x9E3779B9, kKeyStep1 = 0xBB67AE85;

__attribute__((target("avx512f"))) void fill_avx512(
    uint32_t* words, uint64_t first_block, int num_blocks, uint64_t sample, uint64_t key) {
  const __m512i multiplier0 = _mm512_set1_epi64(kMultiplier0), multiplier1 = _mm512_set1_epi64(kMultiplier1);
  // Blocks 0 to 3 are in the even lanes and 4 to 7 in the odd lanes, so that unpacking gives them in order.
  const __m512i lanes = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < num_blocks; i += kBlocksAtOnce) {
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first_block + i)), lanes);
    __m512i c1 = _mm512_srli_epi64(c0, 32);
    __m512i c2 = _mm512_set1_epi64(static_cast<long long>(sample)), c3 = _mm512_srli_epi64(c2, 32);
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    MEGALITE_UNROLL
    for (int round = 0; round < 10; ++round, key0 += kKeyStep0, key1 += kKeyStep1) {
      const __m512i product0 = _mm512_mul_epu32(c0, multiplier0), product1 = _mm512_mul_epu32(c2, multiplier1);
      c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(product1, 32), c1), _mm512_set1_epi64(key0));
      c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(product0, 32), c3), _mm512_set1_epi64(key1));
      c1 = product1;
      c3 = product0;
    }
    const __m512i low = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
    const __m512i high = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
    auto* to = reinterpret_cast<__m512i*>(words + kWordsPerBlock * i);
    _mm512_store_si512(to, _mm512_unpacklo_epi64(low, high));
    _mm512_store_si512(to + 1, _mm512_unpackhi_epi64(low, high));
  }
}

__attribute__((target("avx2"))) void fill_avx2(
    uint32_t* words, uint64_t first_block, int num_blocks, uint64_t sample, uint64_t key) {
  constexpr int kLanes = 4;
  const __m256i multiplier0 = _mm256_set1_epi64x(kMultiplier0), multiplier1 = _mm256_set1_epi64x(kMultiplier1);
  const __m256i lanes = _mm256_setr_epi64x(0, 2, 1, 3);
  for (int i = 0; i < num_blocks; i += kLanes) {
    __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(first_block + i)), lanes);
    __m256i c1 = _mm256_srli_epi64(c0, 32);
    __m256i c2 = _mm256_set1_epi64x(static_cast<long long>(sample)), c3 = _mm256_srli_epi64(c2, 32);
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    MEGALITE_UNROLL
    for (int round = 0; round < 10; ++round, key0 += kKeyStep0, key1 += kKeyStep1) {
      const __m256i product0 = _mm256_mul_epu32(c0, multiplier0), product1 = _mm256_mul_epu32(c2, multiplier1);
      c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), c1), _mm256_set1_epi64x(key0));
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), c3), _mm256_set1_epi64x(key1));
      c1 = product1;
      c3 = product0;
    }
    const __m256i low = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
    const __m256i high = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
    auto* to = reinterpret_cast<__m256i*>(words + kWordsPerBlock * i);
    _mm256_store_si256(to, _mm256_unpacklo_epi64(low, high));
    _mm256_store_si256(to + 1, _mm256_unpackhi_epi64(low, high));
  }
}

#endif

}  // namespace

void fill_words(uint32_t* words, uint64_t first_block, int num_blocks, uint64_t sample, uint64_t key) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (chosen_isa() == Isa::kAvx512) return fill_avx512(words, first_block, num_blocks, sample, key);
  if (chosen_isa() == Isa::kAvx2) return fill_avx2(words, first_block, num_blocks, sample, key);
#endif
  random_words(words, first_block, num_blocks, sample, key);
}

}  // namespace megalite::cpu
