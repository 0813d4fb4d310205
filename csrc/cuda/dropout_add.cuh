// The sum that ends a block of the transformer; see megalite/kernels/dropout.py.
#pragma once

#include "random.cuh"
#include "vector.cuh"

namespace megalite::cuda {

// Computes residual + dropout(x + bias) for neighbouring elements of a row from `column` on.
template <class T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> residual_sum(
    const Vector<T, kWidth>& x, const Wide<T> (&bias)[kWidth], const Vector<T, kWidth>& residual,
    const DropMask& mask, int64_t row, int64_t column) {
  Wide<T> sum[kWidth];
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; ++i) sum[i] = x[i] + bias[i];
  mask.apply(sum, row, column);
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; ++i) sum[i] = residual[i] + sum[i];
  return narrow_all<T>(sum);
}

}  // namespace megalite::cuda
