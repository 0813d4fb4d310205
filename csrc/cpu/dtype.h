// Selects the element type that a loop is compiled for by a tensor's dtype.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "../element.h"

namespace megalite::cpu {

// Calls `function` with a value of the tensor's element type.
template <class Function>
void dispatch_floating(const torch::stable::Tensor& tensor, const Function& function) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return function(double{});
    case ScalarType::Float:
      return function(float{});
    case ScalarType::BFloat16:
      return function(BFloat16{});
    case ScalarType::Half:
      return function(Half{});
    default:
      STD_TORCH_CHECK(false, "expected a tensor of fp64, fp32, bf16 or fp16");
  }
}

}  // namespace megalite::cpu
