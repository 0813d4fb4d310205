// How kernels are started: the element type by its tag, the width of an access, one call for every launch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../element.h"
#include "launch.h"

namespace megalite::cuda {

constexpr int kVectorBytes = 16;  // the widest access a thread has
constexpr size_t kGrantedSharedBytes = 48 << 10;  // for more a kernel must ask

// Elements of T in the widest access.
template <class T>
constexpr int kVectorWidth = kVectorBytes / static_cast<int>(sizeof(T));

// Starts a kernel. There is no <<< >>> in this folder: that syntax is nvcc's alone, and a test compiles these files
// with a C++ compiler, to run them without a GPU.
template <class... Parameters>
void launch(
    void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
    std::common_type_t<Parameters>... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  if (shared_bytes > kGrantedSharedBytes) {
    const auto size = static_cast<int>(shared_bytes);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size) != cudaSuccess) {
      throw std::runtime_error(
          "rows too long for this GPU: a CUDA kernel needs " + std::to_string(size) + " bytes of shared memory");
    }
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) throw std::runtime_error(std::string("a CUDA kernel: ") + cudaGetErrorString(error));
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

// Whether accesses of kVectorBytes fit: rows of so many bytes, at these addresses (null ones fit).
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
