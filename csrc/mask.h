// The decision of dropout; see megalite/kernels/dropout.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace megalite {

struct Mask {
  uint64_t key;
  uint32_t threshold;  // an element is kept if its random word is at least this
  double scale;
};

inline Mask mask_of(double p, int64_t key) {
  const double threshold = std::min(std::nearbyint(p * 0x1p32), 0x1p32 - 1.0);
  return {static_cast<uint64_t>(key), static_cast<uint32_t>(threshold), 1.0 / (1.0 - p)};
}

}  // namespace megalite
