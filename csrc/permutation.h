// A permutation of [0, size) that is computed, not stored.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

// A Feistel network on the bits of size - 1: its rounds change the lower and the upper half in turn, each by a hash of
// the other half (MurmurHash3's 64-bit finalizer). A result that is not below size is permuted again until it is (cycle
// walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"): less than twice on average, because size is
// more than half of the values of its bits.
class Permutation {
 public:
  Permutation(std::int64_t size, std::vector<std::uint64_t> keys)
      : size_(static_cast<std::uint64_t>(size)), keys_(std::move(keys)) {
    if (size < 0) throw std::invalid_argument("size must not be negative");
    int bits = 2;
    while (bits < 63 && size_ > std::uint64_t{1} << bits) ++bits;
    low_bits_ = bits / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
  }

  std::int64_t operator()(std::int64_t number) const {
    std::uint64_t value = static_cast<std::uint64_t>(number);
    if (value >= size_) throw std::invalid_argument("a number is outside the permutation");
    do {
      std::uint64_t low = value & low_mask_, high = value >> low_bits_;
      for (std::size_t i = 0; i < keys_.size(); ++i) {
        if (i % 2 != 0)
          high ^= mix(low + keys_[i]) & high_mask_;
        else
          low ^= mix(high + keys_[i]) & low_mask_;
      }
      value = high << low_bits_ | low;
    } while (value >= size_);
    return static_cast<std::int64_t>(value);
  }

 private:
  static std::uint64_t mix(std::uint64_t value) {
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD;
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53;
    return value ^ value >> 33;
  }

  std::uint64_t size_;
  std::vector<std::uint64_t> keys_;
  int low_bits_;
  std::uint64_t low_mask_, high_mask_;
};
