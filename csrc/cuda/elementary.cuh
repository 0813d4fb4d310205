// Elementary functions for fp64 and fp32, and faster versions for results that are rounded to 16 bits.
#pragma once

#include <cuda_runtime.h>

#include "../element.h"

namespace megalite::cuda {

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

// exp(x) for a result of type T. The special function unit has an error of about |x| units in the last place of fp32:
// too large for fp32, but negligible in 16 bits. It returns 0 below the smallest normal number; __expf and __fdividef
// take three and four more instructions to handle such numbers.
template <class T>
__device__ __forceinline__ Wide<T> exp_for(Wide<T> x) {
  if constexpr (sizeof(T) == 2) {
#if defined(__CUDA_ARCH__)
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504088896341f));
    return power;
#else
    return __expf(x);
#endif
  } else {
    return exp_of(x);
  }
}

// 1 / x for a result of type T; 0 if the result is below the smallest normal number.
template <class T>
__device__ __forceinline__ Wide<T> inverse_for(Wide<T> x) {
  if constexpr (sizeof(T) == 2) {
#if defined(__CUDA_ARCH__)
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
#else
    return __fdividef(1.0f, x);
#endif
  } else {
    return Wide<T>{1} / x;
  }
}

// a * b + c with one rounding. Nothing else is contracted: these files are compiled with --fmad=false.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

}  // namespace megalite::cuda
