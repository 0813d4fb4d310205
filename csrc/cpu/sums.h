// Sums in many short chains, in an order that only depends on the number of terms, on every processor.
#pragma once

#include <cstdint>

#include "../philox.h"

namespace megalite::cpu {

// The sum of term(i) for i in [0, count).
template <class W, class Term>
MEGALITE_INLINE W sum_of(int64_t count, const Term& term) {
  constexpr int kLanes = 256 / sizeof(W);  // four of the widest registers, to cover the latency of an addition
  alignas(64) W lanes[kLanes] = {};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += term(at + lane);
  }
  for (int lane = 0; at < count; ++at, ++lane) lanes[lane] += term(at);
  MEGALITE_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace megalite::cpu
