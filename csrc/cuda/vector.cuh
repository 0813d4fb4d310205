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

// Of 16-bit elements it is to global memory. There the compiler would make four stores of some: they lie in registers
// that are no neighbours.
template <class T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& vector) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2 && sizeof vector == 16) {
    uint32_t words[4];
    memcpy(words, &vector, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
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
