// Element types for C++ and CUDA: the storage and compute type of each.
//
// bf16 and fp16 are plain 16-bit storage with branch-free conversions, because loops over torch's own types do not
// vectorise. Rounding is to nearest, ties to even, as in torch. On a GPU, its own instructions convert, with the same
// results except for the bits of a NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "philox.h"

namespace megalite {

MEGALITE_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

MEGALITE_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Selects `yes` or `no` without a branch: otherwise a compiler would move the sums into the branch and not vectorise.
MEGALITE_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// fp64 is computed in fp64, all others in fp32.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

MEGALITE_INLINE double widen(double value) { return value; }
MEGALITE_INLINE float widen(float value) { return value; }
MEGALITE_INLINE float widen(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }

// A multiplication corrects the exponent's bias: it also makes subnormal numbers normal, exactly.
MEGALITE_INLINE float widen(Half value) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  const uint32_t magnitude = value.bits & 0x7FFFu;
  const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
  const uint32_t special = 0x7F800000u | (magnitude << 13);  // infinity and NaN
  return float_of(select(magnitude >= 0x7C00u, special, finite) | (value.bits & 0x8000u) << 16);
#endif
}

template <class T>
MEGALITE_INLINE T narrow(Wide<T> value) {
  return value;
}

template <>
MEGALITE_INLINE BFloat16 narrow<BFloat16>(float value) {
#if defined(__CUDA_ARCH__)
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(select(is_nan, 0x7FC0u, rounded))};
#endif
}

// Below 2^-14 (fp16's subnormal numbers) the processor rounds: adding 1/2 gives a step of 2^-24, fp16's smallest.
template <>
MEGALITE_INLINE Half narrow<Half>(float value) {
#if defined(__CUDA_ARCH__)
  Half result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  const uint32_t magnitude = bits_of(value) & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t result = select(magnitude < (113u << 23), subnormal, normal);
  result = select(magnitude >= (143u << 23), 0x7C00u, result);  // 2^16 and above
  result = select(magnitude > 0x7F800000u, 0x7E00u, result);
  return {static_cast<uint16_t>(result | sign)};
#endif
}

// Packs two 16-bit elements into a word, the first one in its lower half.
template <class T>
MEGALITE_INLINE float widen_low(uint32_t pair) {
  if constexpr (std::is_same_v<T, BFloat16>) return float_of(pair << 16);
  return widen(T{static_cast<uint16_t>(pair)});
}

template <class T>
MEGALITE_INLINE float widen_high(uint32_t pair) {
  if constexpr (std::is_same_v<T, BFloat16>) return float_of(pair & 0xFFFF0000u);
  return widen(T{static_cast<uint16_t>(pair >> 16)});
}

template <class T>
MEGALITE_INLINE uint32_t narrow_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return narrow<T>(low).bits | uint32_t{narrow<T>(high).bits} << 16;
#endif
}

}  // namespace megalite
