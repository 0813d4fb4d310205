// Kernels right and wrong, to see that their emulation tells which is which.
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace {

using megalite::cuda::launch;

constexpr int kThreads = 64;

__global__ void neighbour(float* out, bool has_barrier) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = threadIdx.x;
  if (has_barrier) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % kThreads];
}

__global__ void half_written(float* out) {
  __shared__ float shared[kThreads];
  if (threadIdx.x < kThreads / 2) shared[threadIdx.x] = 1.0f;
  out[threadIdx.x] = shared[threadIdx.x];
}

__global__ void lonely_barrier(float* out) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void lonely_shuffle(float* out) {
  if (threadIdx.x % 2) out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}

__global__ void half_mask(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFu, 1.0f, 1); }

__global__ void reduced(float* out) {
  __shared__ float shared[kThreads / megalite::cuda::kWarp];
  const float mine = threadIdx.x;
  out[threadIdx.x] = megalite::cuda::block_reduce(mine, shared, megalite::cuda::Add{});
  const float largest = megalite::cuda::block_reduce(-mine, shared, megalite::cuda::Larger{});
  const unsigned votes = __ballot_sync(0xFFFFFFFFu, threadIdx.x % 2);
  const float before = __shfl_up_sync(0xFFFFFFFFu, mine, 1), after = __shfl_down_sync(0xFFFFFFFFu, mine, 1, 16);
  if (largest != 0.0f || votes != 0xAAAAAAAAu) out[threadIdx.x] = -1.0f;
  if (before != (threadIdx.x % 32 ? mine - 1 : mine)) out[threadIdx.x] = -2.0f;
  if (after != (threadIdx.x % 16 < 15 ? mine + 1 : mine)) out[threadIdx.x] = -3.0f;
}

// A launch that does not ask for the shared memory that it takes, which with the kernel's own is over 48 KiB.
void start_unasked(float* out, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = 48 << 10;
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, neighbour, out, true);
  if (error != cudaSuccess) megalite::cuda::refuse(error);
}

}  // namespace

// Runs the kernel of a name, and says what went wrong.
extern "C" __attribute__((visibility("default"))) const char* run(const char* name, float* out) {
  static std::string message;
  const std::string asked = name;
  DeviceGuardHandle guard = nullptr;
  void* stream = nullptr;
  if (asked != "no guard") aoti_torch_create_device_guard(0, &guard);
  if (asked != "no stream") aoti_torch_get_current_cuda_stream(0, &stream);
  const auto start = [&](auto kernel, auto... rest) {
    launch(kernel, dim3(2), dim3(asked == "too large" ? 2048 : kThreads), 0, static_cast<cudaStream_t>(stream), out,
           rest...);
  };
  message.clear();
  try {
    if (asked == "half written") start(half_written);
    else if (asked == "lonely barrier") start(lonely_barrier);
    else if (asked == "lonely shuffle") start(lonely_shuffle);
    else if (asked == "half mask") start(half_mask);
    else if (asked == "reduced") start(reduced);
    else if (asked == "unasked memory") start_unasked(out, stream);
    else start(neighbour, asked != "no barrier");
  } catch (const std::exception& error) {
    message = error.what();
  }
  if (guard) aoti_torch_delete_device_guard(guard);
  return message.c_str();
}
