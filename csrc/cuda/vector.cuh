// Several neighbouring elements that one thread reads or writes in a single access.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../element.h"

namespace megalite::cuda {

// Two 16-bit elements form a word: separately, each would need a register, and instructions to move it there. Vectors
// wider than the widest access need several accesses.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Vector {
  static constexpr bool kPairs = sizeof(T) == 2 && kWidth % 2 == 0;
  using Word = std::conditional_t<kPairs, uint32_t, T>;
  static constexpr int kEach = sizeof(Word) / sizeof(T);

  Word words[kWidth / kEach];

  // Converts an element to the precision of the computation.
  __device__ __forceinline__ Wide<T> operator[](int i) const {
    if constexpr (!kPairs) {
      return widen(words[i]);
    } else {
      return i % 2 == 0 ? widen_low<T>(words[i / 2]) : widen_high<T>(words[i / 2]);
    }
  }
};

template <class T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> narrow_all(const Wide<T> (&wide)[kWidth]) {
  using Result = Vector<T, kWidth>;
  Result vector;
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; i += Result::kEach) {
    if constexpr (Result::kPairs) {
      vector.words[i / 2] = narrow_pair<T>(wide[i], wide[i + 1]);
    } else {
      vector.words[i] = narrow<T>(wide[i]);
    }
  }
  return vector;
}

// Reads the elements from `from` on, which must have a Vector's alignment.
template <int kWidth, class T>
__device__ __forceinline__ Vector<T, kWidth> load(const T* from) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(from);
}

// 16-bit elements are stored to global memory explicitly: for some vectors, the compiler would use four stores, because
// they are in registers that are not neighbours.
template <class T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& vector) {
#if defined(__CUDA_ARCH__)
  if constexpr (Vector<T, kWidth>::kPairs && sizeof vector == 16) {
    const auto& words = vector.words;
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vector<T, kWidth>*>(to) = vector;
}

// The elements in the precision of the computation; 0 for a null pointer.
template <int kWidth, class T>
__device__ __forceinline__ void load_wide(Wide<T> (&wide)[kWidth], const T* from) {
  if (from == nullptr) {
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) wide[i] = Wide<T>{0};
    return;
  }
  const Vector<T, kWidth> vector = load<kWidth>(from);
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; ++i) wide[i] = vector[i];
}

}  // namespace megalite::cuda
