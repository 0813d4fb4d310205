// Several neighbouring elements that one thread reads or writes in a single access.
#pragma once

#include <cuda_runtime.h>

#include "../element.h"

namespace megalite::cuda {

// Wider ones than the widest access take several.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Vector {
  T values[kWidth];
};

// The elements from `from` on, which must be aligned as a Vector is.
template <int kWidth, class T>
__device__ __forceinline__ Vector<T, kWidth> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(from);
}

template <class T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& vector) {
  *reinterpret_cast<Vector<T, kWidth>*>(to) = vector;
}

// The elements in the precision of the computation; those of a null pointer are 0.
template <int kWidth, class T>
__device__ __forceinline__ void load_wide(Wide<T> (&wide)[kWidth], const T* from) {
  if (from == nullptr) {
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) wide[i] = Wide<T>{0};
    return;
  }
  const Vector<T, kWidth> vector = load<kWidth>(from);
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; ++i) wide[i] = widen(vector.values[i]);
}

}  // namespace megalite::cuda
