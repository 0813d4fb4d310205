// Philox4x32-10 and normal numbers from it: the arithmetic of megalite/kernels/philox.py, operation by operation, for
// C++ and CUDA. All must give the same bits, so compile without contracting a * b + c into one rounding
// (-ffp-contract=off; nvcc: --fmad=false) and without -ffast-math.
//
// Sources: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox);
// Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37, 1988.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MEGALITE_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define MEGALITE_INLINE inline __attribute__((always_inline))
#else
#define MEGALITE_INLINE inline
#endif

#if defined(__clang__) || defined(__CUDACC__)
#define MEGALITE_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define MEGALITE_UNROLL _Pragma("GCC unroll 16")
#else
#define MEGALITE_UNROLL
#endif

namespace megalite {

constexpr int kWordsPerBlock = 4;

constexpr int kRounds = 10;
constexpr uint32_t kKeyStep0 = 0x9E3779B9u, kKeyStep1 = 0xBB67AE85u;  // added to the key in each round

MEGALITE_INLINE void philox_round(
    uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t key0, uint32_t key1) {
  const uint64_t product0 = uint64_t{c0} * 0xD2511F53u;
  const uint64_t product1 = uint64_t{c2} * 0xCD9E8D57u;
  c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
  c1 = static_cast<uint32_t>(product1);
  c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
  c3 = static_cast<uint32_t>(product0);
}

// One block: four random words from a counter of four words and a key of two, lowest word first.
MEGALITE_INLINE void philox(uint32_t (&counter)[kWordsPerBlock], uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  MEGALITE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    philox_round(c0, c1, c2, c3, key0, key1);
    key0 += kKeyStep0;
    key1 += kKeyStep1;
  }
  counter[0] = c0;
  counter[1] = c1;
  counter[2] = c2;
  counter[3] = c3;
}

// Generates the words of `num_blocks` consecutive blocks of one sample: element e of the sample is word e % 4 of block
// e / 4. All values in the loop are 32 bits wide, so a compiler can run 4, 8 or 16 blocks side by side.
MEGALITE_INLINE void random_words(
    uint32_t* words, uint64_t first_block, int num_blocks, uint64_t sample, uint64_t key) {
  const uint32_t low = static_cast<uint32_t>(first_block), high = static_cast<uint32_t>(first_block >> 32);
  for (int i = 0; i < num_blocks; ++i) {
    const uint32_t block = low + static_cast<uint32_t>(i);
    uint32_t counter[kWordsPerBlock] = {
        block, high + (block < low), static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)};
    philox(counter, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    MEGALITE_UNROLL
    for (int lane = 0; lane < kWordsPerBlock; ++lane) words[kWordsPerBlock * i + lane] = counter[lane];
  }
}

// log(x) of a positive normal number, to a few units in the last place. libm is not used: its last bits differ.
MEGALITE_INLINE double portable_log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  // x = mantissa * 2^exponent with mantissa in [1/2, 1). The exponent field (of 1022 where x is in [1/2, 1)) becomes
  // a double as the low bits of 2^52: conversions from 64-bit integers do not vectorise before AVX-512.
  const uint64_t exponent_bits = (bits >> 52) | 0x4330000000000000u;
  const uint64_t mantissa_bits = (bits & 0x000FFFFFFFFFFFFFu) | 0x3FE0000000000000u;
  double exponent, mantissa;
  std::memcpy(&exponent, &exponent_bits, sizeof exponent);
  std::memcpy(&mantissa, &mantissa_bits, sizeof mantissa);
  exponent -= 4503599627370496.0 + 1022.0;
  const bool low = mantissa < 0.70710678118654752440;
  mantissa = low ? mantissa + mantissa : mantissa;
  exponent = low ? exponent - 1.0 : exponent;
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double s2 = s * s;
  double series = 2.0 / 23.0;  // log((1 + s) / (1 - s)) = s * (2 + 2/3 s^2 + 2/5 s^4 + ...)
  MEGALITE_UNROLL
  for (int k = 10; k >= 0; --k) series = series * s2 + 2.0 / (2 * k + 1);
  return exponent * 0.69314718055994530942 + s * series;
}

// Square root of a positive normal number, to a few units in the last place, by Newton's iteration for 1 / sqrt(x) from
// the well-known linear guess on the bits (3.4% off; each of the four steps squares the error). std::sqrt is exact, but
// its counterpart in PyTorch uses MKL on some processors, which does not round correctly.
MEGALITE_INLINE double portable_sqrt(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = 0x5FE6EB50C7B537A9u - (bits >> 1);
  double inverse;
  std::memcpy(&inverse, &bits, sizeof inverse);
  const double half = 0.5 * x;
  MEGALITE_UNROLL
  for (int step = 0; step < 4; ++step) inverse = inverse * (1.5 - half * inverse * inverse);
  return x * inverse;
}

// Standard normal number of a random word: the quantile of (word + 1/2) / 2^32 by AS 241. Its third region
// (p < exp(-25)) cannot occur. The other two are rational functions of the same degree: selecting coefficients instead
// of branching keeps the loop around this vectorisable.
MEGALITE_INLINE double standard_normal(uint32_t word) {
  const double p = (static_cast<double>(word) + 0.5) * 0x1p-32;
  const double q = p - 0.5;
  const bool central = std::fabs(q) <= 0.425;
  const double tail = q < 0.0 ? p : 1.0 - p;
  const double r = central ? 0.180625 - q * q : portable_sqrt(-portable_log(tail)) - 1.6;
  const double sign = q < 0.0 ? -1.0 : 1.0;
  const double factor = central ? q : sign;
  double num = central ? 2.5090809287301226727e3 : 7.74545014278341407640e-4;
  num = num * r + (central ? 3.3430575583588128105e4 : 2.27238449892691845833e-2);
  num = num * r + (central ? 6.7265770927008700853e4 : 2.41780725177450611770e-1);
  num = num * r + (central ? 4.5921953931549871457e4 : 1.27045825245236838258e0);
  num = num * r + (central ? 1.3731693765509461125e4 : 3.64784832476320460504e0);
  num = num * r + (central ? 1.9715909503065514427e3 : 5.76949722146069140550e0);
  num = num * r + (central ? 1.3314166789178437745e2 : 4.63033784615654529590e0);
  num = num * r + (central ? 3.3871328727963666080e0 : 1.42343711074968357734e0);
  double den = central ? 5.2264952788528545610e3 : 1.05075007164441684324e-9;
  den = den * r + (central ? 2.8729085735721942674e4 : 5.47593808499534494600e-4);
  den = den * r + (central ? 3.9307895800092710610e4 : 1.51986665636164571966e-2);
  den = den * r + (central ? 2.1213794301586595867e4 : 1.48103976427480074590e-1);
  den = den * r + (central ? 5.3941960214247511077e3 : 6.89767334985100004550e-1);
  den = den * r + (central ? 6.8718700749205790830e2 : 1.67638483018380384940e0);
  den = den * r + (central ? 4.2313330701600911252e1 : 2.05319162663775882187e0);
  den = den * r + 1.0;
  return factor * num / den;
}

}  // namespace megalite
