// Loops of one block over one row, in the widest accesses that the addresses allow.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launch.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace megalite::cuda {

constexpr int kMaxSpanThreads = 512, kMaxSpanWarps = kMaxSpanThreads / kWarp;  // per block

template <int kWidth>
using Width = std::integral_constant<int, kWidth>;

// Number of threads for a span of this many elements of T: whole warps, with kInFlight vectors per thread if possible.
template <class T, int kInFlight>
dim3 span_threads(int64_t count) {
  constexpr int kEach = kVectorWidth<T> * kInFlight;
  const int64_t needed = std::max<int64_t>((count + kEach - 1) / kEach, 1);
  return dim3(static_cast<unsigned>(std::min<int64_t>((needed + kWarp - 1) / kWarp * kWarp, kMaxSpanThreads)));
}

// Calls apply(loaded, vector) once for each vector in [0, vectors), with loaded = load(vector). A vector always belongs
// to the same thread of the block. A thread loads kInFlight vectors before it applies the first. Conditional loads for
// the remainder would put each 16-bit number into a separate register.
template <int kInFlight, class Load, class Apply>
__device__ __forceinline__ void for_vectors(int64_t vectors, const Load& load, const Apply& apply) {
  const int64_t step = blockDim.x;
  int64_t vector = threadIdx.x;
  for (; vector + (kInFlight - 1) * step < vectors; vector += kInFlight * step) {
    decltype(load(vector)) loaded[kInFlight];
    MEGALITE_UNROLL
    for (int i = 0; i < kInFlight; ++i) loaded[i] = load(vector + i * step);
    MEGALITE_UNROLL
    for (int i = 0; i < kInFlight; ++i) apply(loaded[i], vector + i * step);
  }
  for (; vector < vectors; vector += step) apply(load(vector), vector);
}

// A row of vectors that each pass reads from memory again, kInFlight at a time.
template <int kInFlight, class Load>
struct StreamedRow {
  int64_t vectors;
  Load load;

  // Calls apply(loaded, vector, slot) for each of the thread's vectors.
  template <class Apply>
  __device__ __forceinline__ void each(const Apply& apply) const {
    for_vectors<kInFlight>(vectors, load, [&](const auto& loaded, int64_t vector) { apply(loaded, vector, 0); });
  }
};

template <int kInFlight, class Load>
__device__ __forceinline__ StreamedRow<kInFlight, Load> streamed_row(int64_t vectors, const Load& load) {
  return {vectors, load};
}

// The vector in a thread's slot, if the row has as many.
__device__ __forceinline__ int vector_of(int slot) { return static_cast<int>(threadIdx.x + slot * blockDim.x); }

// A row of vectors that is read once. Each thread holds at most kSlots of them in registers, the same vectors as with a
// StreamedRow.
template <int kSlots, class Loaded>
struct HeldRow {
  int vectors;
  Loaded loaded[kSlots];

  // Like StreamedRow's. The slot is a constant after unrolling, so that it can index other registers.
  template <class Apply>
  __device__ __forceinline__ void each(const Apply& apply) const {
    MEGALITE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      const int vector = vector_of(slot);
      if (vector < vectors) apply(loaded[slot], vector, slot);
    }
  }
};

// Reads the whole row before using it. A slot beyond the row reads the last vector, without a condition; see
// for_vectors.
template <int kSlots, class Load>
__device__ __forceinline__ auto held_row(int vectors, const Load& load) {
  HeldRow<kSlots, decltype(load(0))> row;
  row.vectors = vectors;
  MEGALITE_UNROLL
  for (int slot = 0; slot < kSlots; ++slot) {
    const int vector = vector_of(slot);
    row.loaded[slot] = load(vector < vectors ? vector : vectors - 1);
  }
  return row;
}

// Calls apply(loaded, at, width) once for all elements in [0, count), with loaded = load(at, width) for the elements
// from `at` on: one vector at a time (width is a constant), and single elements at the end. The assignment to threads
// and the order of sums only depend on `count` and the block: the same row gives the same bits at any address.
template <int kInFlight, class T, class Load, class Apply>
__device__ __forceinline__ void sum_span(int64_t count, const Load& load, const Apply& apply) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t vectors = count / kWidth;
  for_vectors<kInFlight>(
      vectors, [&](int64_t vector) { return load(vector * kWidth, Width<kWidth>{}); },
      [&](const auto& loaded, int64_t vector) { apply(loaded, vector * kWidth, Width<kWidth>{}); });
  for (int64_t at = vectors * kWidth + threadIdx.x; at < count; at += blockDim.x) {
    apply(load(at, Width<1>{}), at, Width<1>{});
  }
}

// Like sum_span, for operations without sums. If all pointers (to their elements 0) have the same alignment, vectors
// begin at an aligned element, and the elements before it are also processed one by one.
template <int kInFlight, class T, class Load, class Apply, class... Others>
__device__ __forceinline__ void for_span(
    int64_t count, const Load& load, const Apply& apply, const T* pointer, const Others*... others) {
  constexpr int kWidth = kVectorWidth<T>;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const bool are_alike = (((reinterpret_cast<uintptr_t>(others) ^ address) | ... | 0) & (kVectorBytes - 1)) == 0;
  const auto before = static_cast<int64_t>((0 - address) % kVectorBytes / sizeof(T));  // before an aligned element
  const int64_t head = are_alike && before < count ? before : count;
  const int64_t vectors = (count - head) / kWidth;
  for_vectors<kInFlight>(
      vectors, [&](int64_t vector) { return load(head + vector * kWidth, Width<kWidth>{}); },
      [&](const auto& loaded, int64_t vector) { apply(loaded, head + vector * kWidth, Width<kWidth>{}); });
  for (int64_t i = threadIdx.x; i < count - vectors * kWidth; i += blockDim.x) {
    const int64_t at = i < head ? i : i + vectors * kWidth;
    apply(load(at, Width<1>{}), at, Width<1>{});
  }
}

// Single elements, which need not be aligned.
template <int kWidth, class T>
__device__ __forceinline__ Vector<T, kWidth> load_each(const T* from) {
  T values[kWidth];
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; ++i) values[i] = from[i];
  Vector<T, kWidth> vector;
  memcpy(&vector, values, sizeof vector);
  return vector;
}

// Calls function(load): load(from, width) is the fastest load for vectors that begin at these pointers or a whole
// number of vectors after them. It is selected once: a choice at each load would delay it until the previous load ends.
template <class Function, class... Pointers>
__device__ __forceinline__ void with_loads(const Function& function, const Pointers*... pointers) {
  if (((reinterpret_cast<uintptr_t>(pointers) | ...) & (kVectorBytes - 1)) == 0) {
    function([](const auto* from, auto width) { return load<decltype(width)::value>(from); });
  } else {
    function([](const auto* from, auto width) { return load_each<decltype(width)::value>(from); });
  }
}

template <class T>
__device__ __forceinline__ void zero_span(T* to, int64_t count) {
  struct Nothing {};
  for_span<1>(
      count, [](int64_t, auto) { return Nothing{}; },
      [=](Nothing, int64_t at, auto width) { store(to + at, Vector<T, decltype(width)::value>{}); }, to);
}

// Sums the values of the block's threads; every thread gets the sums.
template <int kNum, class W>
__device__ __forceinline__ void block_sums(W (&values)[kNum], W (&shared)[kMaxSpanWarps][kNum]) {
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  MEGALITE_UNROLL
  for (int i = 0; i < kNum; ++i) values[i] = warp_reduce(values[i], Add{});
  if (num_warps == 1) return;
  if (threadIdx.x % kWarp == 0) {
    MEGALITE_UNROLL
    for (int i = 0; i < kNum; ++i) shared[warp][i] = values[i];
  }
  __syncthreads();
  const int lane = threadIdx.x % kMaxSpanWarps;
  MEGALITE_UNROLL
  for (int i = 0; i < kNum; ++i) {
    const W of_warp = lane < num_warps ? shared[lane][i] : W{0};
    values[i] = warp_reduce<kMaxSpanWarps>(of_warp, Add{});
  }
  __syncthreads();
}

}  // namespace megalite::cuda
