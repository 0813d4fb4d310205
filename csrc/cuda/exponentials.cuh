// The largest of many numbers and the sum of their exponentials, in one pass over them.
#pragma once

#include <cmath>

#include "elementary.cuh"
#include "reduce.cuh"

namespace megalite::cuda {

// The largest number so far, and the sum of exp(number - largest), which is scaled down by a larger number. T is the
// dtype of the numbers, or of the result.
template <class T>
struct Exponentials {
  using W = Wide<T>;

  W largest = -static_cast<W>(INFINITY), sum = 0;

  template <int kNum>
  __device__ __forceinline__ void add(const W (&numbers)[kNum]) {
    W top = largest;
    MEGALITE_UNROLL
    for (int i = 0; i < kNum; ++i) top = Larger{}(top, numbers[i]);
    if (top != largest) {  // a NaN differs from itself, and stays
      sum *= exp_for<T>(largest - top);
      largest = top;
    }
    if (largest == -static_cast<W>(INFINITY)) return;  // all numbers are -inf: exp(-inf + inf) would be NaN
    MEGALITE_UNROLL
    for (int i = 0; i < kNum; ++i) sum += exp_for<T>(numbers[i] - largest);
  }
};

// Combines the values of all threads in the block; every thread gets the result.
template <class T>
__device__ __forceinline__ Exponentials<T> block_combine(const Exponentials<T>& mine, Wide<T>* shared) {
  Exponentials<T> all;
  all.largest = block_reduce(mine.largest, shared, Larger{});
  const Wide<T> share = mine.sum == 0 ? Wide<T>{0} : mine.sum * exp_for<T>(mine.largest - all.largest);
  all.sum = block_reduce(share, shared, Add{});
  return all;
}

}  // namespace megalite::cuda
