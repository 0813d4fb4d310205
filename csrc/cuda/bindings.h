// Common code of the CUDA kernels' bindings: the device and stream of a call, pointers and dtypes of tensors.
#pragma once

// Define this before including torch's headers: it makes them declare the current stream.
#ifndef USE_CUDA
#define USE_CUDA
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "../checks.h"
#include "launch.h"

#define MEGALITE_DEVICE cuda::ops  // launchers with the same names are in megalite::cuda
#include "../ops.h"

namespace megalite::cuda {

using torch::stable::Tensor;

// Makes a tensor's device current during this object's lifetime, and holds the device's current stream.
class __attribute__((visibility("hidden"))) Place {
 public:
  explicit Place(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    // torch's macro for this is not used because its name differs between torch 2.11 and 2.13.
    const auto status = aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream);
    STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS, "torch gives no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline Dtype dtype_of(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return Dtype::kDouble;
    case ScalarType::Float:
      return Dtype::kFloat;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kHalf;
    default:
      STD_TORCH_CHECK(false, "expected a tensor of fp64, fp32, bf16 or fp16");
  }
}

inline std::optional<Tensor> dense(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(torch::stable::contiguous(*tensor)) : std::nullopt;
}

inline const void* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// Allocates memory for the parts of `num_sums` sums per column.
inline Tensor new_workspace(const Tensor& like, int64_t rows, int64_t columns, int64_t num_sums = 1) {
  const int64_t parts = max_sum_parts(dtype_of(like), rows, columns);
  return torch::stable::new_empty(like, {parts * num_sums * columns}, computed_in(like));
}

}  // namespace megalite::cuda
