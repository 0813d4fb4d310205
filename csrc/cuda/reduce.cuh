// Reductions over a warp or a block, in an order that only depends on the block's size; every thread gets the result.
// Blocks are one-dimensional and consist of whole warps, and all threads must take part.
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

// Unlike fmax, this returns NaN if either argument is NaN.
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

// Each group of kLanes neighbouring lanes gets the combination of its values.
template <int kLanes = kWarp, class W, class Combine>
__device__ __forceinline__ W warp_reduce(W value, const Combine& combine) {
  MEGALITE_UNROLL
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

// `shared` holds one value per warp of the block; it may be reused right after the call.
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
