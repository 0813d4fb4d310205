// As much of CUDA as csrc/cuda uses, for a C++ compiler without a GPU: kernels run as they are written, a block after
// the other, each of a block's threads on a stack of its own.
//
// Threads take turns where CUDA makes them wait for each other, in the order that CUDA_ON_CPU_ORDER names: forward,
// reverse, or shuffled anew at each turn. A missing barrier shows as a result that one of the orders changes. Shared
// memory is NaN when a block starts. What CUDA leaves undefined or refuses is an error here: a barrier that not all
// threads reach, a partial mask, a block too large, an address not aligned (under UBSan), a launch without its device.
//
// Functions are off by as much as the CUDA C++ Programming Guide allows ("Mathematical Functions").
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // one block at a time runs in a thread

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern uint3 threadIdx, blockIdx;  // of the thread that has its turn
extern dim3 blockDim, gridDim;

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidConfiguration,
  cudaErrorLaunchFailure,
  cudaErrorNoKernelImageForDevice
};
typedef struct CUstream_st* cudaStream_t;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace cuda_on_cpu {

enum class Wait { kNot, kBlock, kWarp };

constexpr int kWarp = 32;
constexpr size_t kMaxValue = 16, kMaxSharedBytes = 227 << 10;  // as much as a Hopper GPU's block may ask for

// Lets a kernel have so much dynamic shared memory: else 48 KiB are for that and the kernel's static memory together.
cudaError_t grant(const void* kernel, size_t bytes);

// Runs `thread`, a call of the kernel, as every thread of the grid.
cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& thread);

// Lets the others run until all of the block, or of the warp, wait.
void wait(Wait what);

// Shows a value to the warp; returns what the lanes showed, kMaxValue bytes each, to be read before the next call.
const unsigned char* exchange(unsigned mask, const void* value, size_t size);

inline int lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarp; }

template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= kMaxValue);
  std::memcpy(&value, exchange(mask, &value, sizeof value) + source * kMaxValue, sizeof value);
  return value;
}

// `value` times 1 plus or minus so many units in the last place.
inline float off_by(float value, float ulps) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const double sign = bits * 2654435761u >> 31 ? 1.0 : -1.0;
  return static_cast<float>(value * (1.0 + sign * ulps * 0x1p-23));
}

// Exact at 0 and at the ends (CUDA Math API, expf; PTX ISA, ex2.approx).
inline float rough_exp(float x, float ulps = 2.0f) {
  return x == 0.0f || std::isinf(x) ? std::exp(x) : off_by(std::exp(x), ulps);
}
inline float rough_log(float x) { return off_by(std::log(x), 1.0f); }

}  // namespace cuda_on_cpu

const char* cudaGetErrorString(cudaError_t);

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  return cuda_on_cpu::run(*config, reinterpret_cast<const void*>(kernel), [&] { kernel(arguments...); });
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  return cuda_on_cpu::grant(reinterpret_cast<const void*>(kernel), static_cast<size_t>(value));
}

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::Wait::kBlock); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { cuda_on_cpu::exchange(mask, "", 1); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = cuda_on_cpu::kWarp) {
  return cuda_on_cpu::shuffle(mask, value, cuda_on_cpu::lane() / width * width + source % width);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = cuda_on_cpu::kWarp) {
  const int lane = cuda_on_cpu::lane(), source = lane ^ bits;
  return cuda_on_cpu::shuffle(mask, value, source / width > lane / width ? lane : source);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = cuda_on_cpu::kWarp) {
  const int lane = cuda_on_cpu::lane(), source = lane + static_cast<int>(distance);
  return cuda_on_cpu::shuffle(mask, value, source / width > lane / width ? lane : source);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = cuda_on_cpu::kWarp) {
  const int lane = cuda_on_cpu::lane(), source = lane - static_cast<int>(distance);
  return cuda_on_cpu::shuffle(mask, value, source < lane / width * width ? lane : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const unsigned char mine = predicate != 0;
  const unsigned char* all = cuda_on_cpu::exchange(mask, &mine, 1);
  unsigned votes = 0;
  for (int lane = 0; lane < cuda_on_cpu::kWarp; ++lane) votes |= unsigned{all[lane * cuda_on_cpu::kMaxValue]} << lane;
  return votes;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

inline float __expf(float x) { return cuda_on_cpu::rough_exp(x, 2.0f + std::floor(std::fabs(1.173f * x))); }

inline float __logf(float x) {
  const float exact = std::log(x);
  return x > 0.5f && x < 2.0f ? exact + 0x1p-21f * 0.75f : cuda_on_cpu::off_by(exact, 3.0f);
}

inline float __fdividef(float x, float y) {
  const float size = std::fabs(y);
  return size > 0x1p126f && size < INFINITY ? x * 0.0f : cuda_on_cpu::off_by(x / y, 2.0f);
}

inline float rsqrtf(float x) { return cuda_on_cpu::off_by(1.0f / std::sqrt(x), 2.0f); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }

#define expf cuda_on_cpu::rough_exp
#define logf cuda_on_cpu::rough_log
