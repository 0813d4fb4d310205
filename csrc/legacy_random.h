// The same shuffle as numpy.random.RandomState(seed).shuffle, several times as fast.
//
// A shuffle of an array larger than the caches waits for memory at each swap. The positions only depend on the
// generator, so a block of positions is drawn ahead, and their memory is prefetched.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>

#include "progress.h"

// The Mersenne Twister MT19937 (Matsumoto and Nishimura 1998), one block of numbers at a time.
class LegacyRandom {
 public:
  explicit LegacyRandom(std::int64_t seed) {
    if (seed < 0 || seed > std::numeric_limits<std::uint32_t>::max())
      throw std::invalid_argument("the seed must be in [0, 2**32)");
    std::uint32_t word = static_cast<std::uint32_t>(seed);
    for (std::uint32_t i = 0; i < kSize; ++i) {
      state_[i] = word;
      word = 1812433253U * (word ^ (word >> 30)) + i + 1;
    }
  }

  // A Fisher-Yates shuffle from the last element down, as in numpy: element i is swapped with one of [0, i]. Counts
  // elements.
  template <typename T>
  void shuffle(T* values, std::int64_t size, Progress* progress) {
    std::array<std::int64_t, kBlock> targets;
    for (std::int64_t last = size - 1; last >= 1;) {
      const std::int64_t count = std::min<std::int64_t>(last, kBlock);
      draw(last, count, targets.data());
      for (std::int64_t k = 0; k < count; ++k) __builtin_prefetch(values + targets[k], 1);
      for (std::int64_t k = 0; k < count; ++k) std::swap(values[last - k], values[targets[k]]);
      last -= count;
      add_to(progress, count);
    }
  }

 private:
  static constexpr std::uint32_t kSize = 624, kShift = 397;
  static constexpr std::int64_t kBlock = 256;

  // Draws count numbers, the k-th uniform in [0, largest - k]: masked to the bits of the bound, and redrawn above it.
  void draw(std::int64_t largest, std::int64_t count, std::int64_t* numbers) {
    for (std::int64_t k = 0; k < count;) {
      const std::int64_t bound = largest - k;
      const bool wide = bound > std::numeric_limits<std::uint32_t>::max();
      const std::int64_t mask = mask_of(bound);
      // While the mask stays the same. No branch depends on a random number: half of its predictions would be wrong.
      const std::int64_t end = std::min(count, k + bound - mask / 2);
      while (k < end) {
        const std::int64_t number = (wide ? next64() : next()) & mask;
        numbers[k] = number;
        k += number <= largest - k;
      }
    }
  }

  static std::int64_t mask_of(std::int64_t bound) {
    std::uint64_t mask = static_cast<std::uint64_t>(bound);
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    return static_cast<std::int64_t>(mask);
  }

  std::int64_t next() {
    if (position_ == kSize) refill();
    return numbers_[position_++];
  }

  std::int64_t next64() {
    const std::uint64_t high = static_cast<std::uint64_t>(next());
    return static_cast<std::int64_t>(high << 32 | static_cast<std::uint64_t>(next()));
  }

  void twist(std::uint32_t i, std::uint32_t following, std::uint32_t shifted) {
    const std::uint32_t word = (state_[i] & 0x80000000U) | (state_[following] & 0x7fffffffU);
    state_[i] = state_[shifted] ^ (word >> 1) ^ (-(word & 1U) & 0x9908b0dfU);
  }

  void refill() {
    for (std::uint32_t i = 0; i < kSize - kShift; ++i) twist(i, i + 1, i + kShift);
    for (std::uint32_t i = kSize - kShift; i < kSize - 1; ++i) twist(i, i + 1, i + kShift - kSize);
    twist(kSize - 1, 0, kShift - 1);
    for (std::uint32_t i = 0; i < kSize; ++i) {
      std::uint32_t word = state_[i];
      word ^= word >> 11;
      word ^= (word << 7) & 0x9d2c5680U;
      word ^= (word << 15) & 0xefc60000U;
      numbers_[i] = word ^ (word >> 18);
    }
    position_ = 0;
  }

  std::array<std::uint32_t, kSize> state_, numbers_;
  std::uint32_t position_ = kSize;
};
