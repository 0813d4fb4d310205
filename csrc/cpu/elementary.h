// The exponential function for fp32 and fp64 in plain arithmetic, so that a loop around it vectorises. The error is
// about one unit in the last place; the result is 0 below the smallest normal number and infinity above the largest.
//
// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2. ln 2 is split into two parts. The first part ends
// with zero bits, so n times it is exact. exp(r) is a Taylor series that ends when a term is under half an ulp.
#pragma once

#include "dtype.h"

namespace megalite::cpu {

template <class Real>
struct ExpTraits;

template <>
struct ExpTraits<float> {
  using Bits = uint32_t;
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  static constexpr float kInverseLn2 = 1.44269504088896341f;
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682030941723e-6f;
  static constexpr float kSmallest = -87.33f, kLargest = 88.72f;
  static constexpr int kMantissa = 23, kBias = 127, kTerms = 7;
};

template <>
struct ExpTraits<double> {
  using Bits = uint64_t;
  static constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kInverseLn2 = 1.44269504088896340736;
  static constexpr double kLn2High = 6.93147180369123816490e-1, kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kSmallest = -708.39, kLargest = 709.78;
  static constexpr int kMantissa = 52, kBias = 1023, kTerms = 13;
};

constexpr double inverse_factorial(int n) { return n <= 1 ? 1.0 : inverse_factorial(n - 1) / n; }

template <class Real>
struct ExpSeries {
  Real coefficient[14];
  constexpr ExpSeries() : coefficient{} {
    for (int k = 0; k < 14; ++k) coefficient[k] = static_cast<Real>(inverse_factorial(k));
  }
};

template <class Real>
MEGALITE_INLINE Real exp_of(Real x) {
  using Traits = ExpTraits<Real>;
  using Bits = typename Traits::Bits;
  constexpr ExpSeries<Real> kSeries;
  const Real inside = x < Traits::kSmallest ? Traits::kSmallest : (x > Traits::kLargest ? Traits::kLargest : x);
  const Real shifted = inside * Traits::kInverseLn2 + Traits::kShift;
  const Real n = shifted - Traits::kShift;
  const Real r = (inside - n * Traits::kLn2High) - n * Traits::kLn2Low;
  Real series = kSeries.coefficient[Traits::kTerms];
  MEGALITE_UNROLL
  for (int k = Traits::kTerms - 1; k >= 0; --k) series = series * r + kSeries.coefficient[k];
  // 2^n as two factors: 2^128 is not an fp32 number, but half of it times a series above 1 may be one.
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const Bits exponent = (bits + (Traits::kBias - 1)) << Traits::kMantissa;
  Real half_power;
  std::memcpy(&half_power, &exponent, sizeof half_power);
  const Real value = series * half_power * Real{2};
  return x < Traits::kSmallest ? Real{0} : (x > Traits::kLargest ? static_cast<Real>(INFINITY) : value);
}

// 1 / (1 + exp(-x)).
template <class Real>
MEGALITE_INLINE Real sigmoid_of(Real x) {
  return Real{1} / (Real{1} + exp_of(-x));
}

}  // namespace megalite::cpu
