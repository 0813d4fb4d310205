// Launching kernels: selects the element type by its tag and the width of accesses, and starts every kernel.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../element.h"
#include "launch.h"

namespace megalite::cuda {

constexpr int kVectorBytes = 16;  // width of a thread's widest memory access
constexpr size_t kUnaskedSharedBytes = 47 << 10;  // a kernel must request more: 48 KiB minus static shared memory

// Elements of T in the widest access.
template <class T>
constexpr int kVectorWidth = kVectorBytes / static_cast<int>(sizeof(T));

[[noreturn]] inline void refuse(cudaError_t error) {
  std::string told = std::string("a CUDA kernel: ") + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    told += " (megalite's are for compute capability 8.0 and later: build it with CUDA_HOME=none, and PyTorch serves)";
  }
  throw std::runtime_error(told);
}

// Starts a kernel. This folder does not use <<< >>>: only nvcc supports that syntax, and a test compiles these files
// with a C++ compiler to run them without a GPU.
template <class... Parameters>
void launch(
    void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
    std::common_type_t<Parameters>... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kUnaskedSharedBytes) {
    const auto size = static_cast<int>(shared_bytes);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
    if (error == cudaErrorInvalidValue) {
      throw std::runtime_error(
          "rows too long for this GPU: a CUDA kernel needs " + std::to_string(size) + " bytes of shared memory");
    }
  }
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) refuse(error);
}

// Returns a grid with one block per row.
inline dim3 block_each(int64_t rows) {
  if (rows > INT32_MAX) throw std::runtime_error("too many rows for a CUDA kernel: " + std::to_string(rows));
  return dim3(static_cast<unsigned>(rows));
}

// Calls `function` with a value of the tagged element type.
template <class Function>
void dispatch(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::kDouble:
      return function(double{});
    case Dtype::kFloat:
      return function(float{});
    case Dtype::kBFloat16:
      return function(BFloat16{});
    case Dtype::kHalf:
      return function(Half{});
  }
}

// Returns whether rows of this size at these addresses allow accesses of kVectorBytes; null pointers do.
template <class... Pointers>
bool fits_vectors(int64_t row_bytes, const Pointers*... pointers) {
  const uintptr_t bits = static_cast<uintptr_t>(row_bytes) | (reinterpret_cast<uintptr_t>(pointers) | ...);
  return bits % kVectorBytes == 0;
}

// Calls `function` with the number of elements per access as a std::integral_constant.
template <class T, class Function>
void dispatch_width(bool fits, const Function& function) {
  if (fits) return function(std::integral_constant<int, kVectorWidth<T>>{});
  return function(std::integral_constant<int, 1>{});
}

}  // namespace megalite::cuda
