// Sums and the like over a warp or a block, in an order that depends on nothing but the block's size; every thread
// gets the result. Blocks are one-dimensional and have whole warps, and all of their threads take part.
#pragma once

#include <cuda_runtime.h>

#include "../element.h"

namespace megalite::cuda {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

struct Add {
  template <class W>
  __device__ __forceinline__ W operator()(W a, W b) const {
    return a + b;
  }
};

// A NaN wins, unlike in fmax: else it would be lost.
struct Larger {
  template <class W>
  __device__ __forceinline__ W operator()(W a, W b) const {
#if defined(__CUDA_ARCH__)
    if constexpr (std::is_same_v<W, float>) {
      float larger;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
      return larger;
    }
#endif
    return a > b || a != a ? a : b;
  }
};

// Each kLanes neighbouring lanes get what their values combine to.
template <int kLanes = kWarp, class W, class Combine>
__device__ __forceinline__ W warp_reduce(W value, const Combine& combine) {
  MEGALITE_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

// `shared` holds a value for each of the block's warps; it may be used again right after.
template <class W, class Combine>
__device__ __forceinline__ W block_reduce(W value, W* shared, const Combine& combine) {
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  value = warp_reduce(value, combine);
  if (num_warps == 1) return value;
  if (threadIdx.x % kWarp == 0) shared[warp] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < num_warps; ++i) value = combine(value, shared[i]);
  __syncthreads();
  return value;
}

}  // namespace megalite::cuda
