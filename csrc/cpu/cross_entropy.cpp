// Cross-entropy over a part of the vocabulary on the CPU; see
// megalite/kernels/cross_entropy.py.
#include "contract.h"

#include <cmath>
#include <limits>

#include "../ops.h"
#include "../row_checks.h"
#include "elementary.h"
#include "rows.h"

namespace megalite::cpu {
namespace {

using torch::stable::Tensor;

constexpr int64_t kPiece = 1024;  // logits read twice, for maximum and sum, so they must stay in the cache
constexpr int64_t kChain = 32;    // logits summed in the precision of the computation; longer sums are in fp64

template <class Real>
struct RowStatistics {
  Real largest;
  Real sum;
};

template <class Real, class T>
MEGALITE_INLINE Real largest_of(const T* x, int64_t count) {
  Real largest = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<Real>(widen(x[i])));
  return largest;
}

template <class Real, class T>
MEGALITE_INLINE Real sum_of_exponentials(const T* x, int64_t count, Real largest) {
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += exp_of(static_cast<Real>(widen(x[i])) - largest);
  return sum;
}

// One pass over memory: the sum so far is scaled down whenever a piece has a larger maximum.
template <class Real, class T>
MEGALITE_INLINE RowStatistics<Real> statistics_of(const T* x, int64_t count) {
  Real largest = -std::numeric_limits<Real>::infinity();
  double sum = 0.0;
  for (int64_t at = 0; at < count; at += kPiece) {
    const int64_t num = std::min(kPiece, count - at);
    const Real here = largest_of<Real>(x + at, num);
    if (here > largest) {
      sum *= exp_of(static_cast<double>(largest) - static_cast<double>(here));
      largest = here;
    }
    // If all logits are -inf so far, the sum is 0 and not exp(-inf + inf).
    const Real base = largest == -std::numeric_limits<Real>::infinity() ? Real{0} : largest;
    for (int64_t i = 0; i < num; i += kChain) {
      sum += sum_of_exponentials<Real>(x + at + i, std::min(kChain, num - i), base);
    }
  }
  return {largest, static_cast<Real>(sum)};
}

}  // namespace

Tensor cross_entropy_statistics(const Tensor& logits, const Tensor& targets, int64_t start, int64_t num_real) {
  check_logits(logits, targets, num_real);
  const int64_t columns = logits.size(logits.dim() - 1), rows = targets.numel();
  const auto dense_targets = torch::stable::contiguous(targets);
  const auto* target = static_cast<const int64_t*>(dense_targets.const_data_ptr());
  auto out = torch::stable::new_empty(logits, {3, rows}, computed_in(logits));
  dispatch_floating(logits, [&](auto element) {
    using T = decltype(element);
    using Real = Wide<T>;
    const T* x = static_cast<const T*>(logits.const_data_ptr());
    Real* result = static_cast<Real*>(out.mutable_data_ptr());
    for_rows(rows, columns, [=](int64_t r) MEGALITE_BODY {
      const auto found = statistics_of<Real>(x + r * columns, num_real);
      const int64_t column = target[r] - start;
      result[r] = found.largest;
      result[rows + r] = found.sum;
      result[2 * rows + r] = 0 <= column && column < num_real ? widen(x[r * columns + column]) : Real{0};
    });
  });
  return out;
}

void cross_entropy_gradient_(
    Tensor logits, const Tensor& targets, const Tensor& statistics, const Tensor& grad, int64_t start,
    int64_t num_real) {
  check_logits(logits, targets, num_real);
  const int64_t columns = logits.size(logits.dim() - 1), rows = targets.numel();
  check_statistics(logits, statistics, grad, rows);
  const auto dense_statistics = torch::stable::contiguous(statistics), upper = torch::stable::contiguous(grad);
  const auto dense_targets = torch::stable::contiguous(targets);
  const auto* target = static_cast<const int64_t*>(dense_targets.const_data_ptr());
  dispatch_floating(logits, [&](auto element) {
    using T = decltype(element);
    using Real = Wide<T>;
    T* x = static_cast<T*>(logits.mutable_data_ptr());
    const Real* largest = static_cast<const Real*>(dense_statistics.const_data_ptr());
    const Real* total = largest + rows;
    const Real* gradient = static_cast<const Real*>(upper.const_data_ptr());
    for_rows(rows, columns, [=](int64_t r) MEGALITE_BODY {
      T* row = x + r * columns;
      const Real base = largest[r], scale = gradient[r] / total[r];
      const int64_t column = target[r] - start;
      const bool is_mine = 0 <= column && column < num_real;
      const Real at_target = is_mine ? exp_of(widen(row[column]) - base) * scale - gradient[r] : Real{0};
#pragma omp simd
      for (int64_t i = 0; i < num_real; ++i) row[i] = narrow<T>(exp_of(widen(row[i]) - base) * scale);
      if (is_mine) row[column] = narrow<T>(at_target);
      for (int64_t i = num_real; i < columns; ++i) row[i] = narrow<T>(Real{0});
    });
  });
}

}  // namespace megalite::cpu
