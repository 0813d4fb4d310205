// The library of CUDA kernels, on torch's stable ABI: importing it registers them.
#include "bindings.h"

#include <Python.h>
#include <torch/csrc/stable/library.h>

// A test that runs these kernels without a GPU registers them for the CPU.
#ifndef MEGALITE_DISPATCH_KEY
#define MEGALITE_DISPATCH_KEY CUDA
#endif

STABLE_TORCH_LIBRARY_IMPL(megalite, MEGALITE_DISPATCH_KEY, library) {
  library.impl("adamw_", TORCH_BOX(&megalite::cuda::ops::adamw_));
  library.impl("add_weight_and_bias_gradient_", TORCH_BOX(&megalite::cuda::ops::add_weight_and_bias_gradient_));
  library.impl("bias_dropout_add", TORCH_BOX(&megalite::cuda::ops::bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&megalite::cuda::ops::bias_dropout_add_backward));
  library.impl("bias_dropout_add_norm", TORCH_BOX(&megalite::cuda::ops::bias_dropout_add_norm));
  library.impl("bias_dropout_add_norm_backward", TORCH_BOX(&megalite::cuda::ops::bias_dropout_add_norm_backward));
  library.impl("bias_gelu", TORCH_BOX(&megalite::cuda::ops::bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&megalite::cuda::ops::bias_gelu_backward));
  library.impl("bias_swiglu", TORCH_BOX(&megalite::cuda::ops::bias_swiglu));
  library.impl("bias_swiglu_backward", TORCH_BOX(&megalite::cuda::ops::bias_swiglu_backward));
  library.impl("causal_softmax_", TORCH_BOX(&megalite::cuda::ops::causal_softmax_));
  library.impl("causal_softmax_backward_", TORCH_BOX(&megalite::cuda::ops::causal_softmax_backward_));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&megalite::cuda::ops::cross_entropy_gradient_));
  library.impl("cross_entropy_statistics", TORCH_BOX(&megalite::cuda::ops::cross_entropy_statistics));
  library.impl("dropout", TORCH_BOX(&megalite::cuda::ops::dropout));
  library.impl("fill_normal_", TORCH_BOX(&megalite::cuda::ops::fill_normal_));
  library.impl("gelu_linear_backward", TORCH_BOX(&megalite::cuda::ops::gelu_linear_backward));
  library.impl("layer_norm", TORCH_BOX(&megalite::cuda::ops::layer_norm));
  library.impl("layer_norm_backward", TORCH_BOX(&megalite::cuda::ops::layer_norm_backward));
  library.impl("linear_gelu", TORCH_BOX(&megalite::cuda::ops::linear_gelu));
  library.impl("rms_norm", TORCH_BOX(&megalite::cuda::ops::rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&megalite::cuda::ops::rms_norm_backward));
  library.impl("rotate", TORCH_BOX(&megalite::cuda::ops::rotate));
}

// Python imports a shared library only if it is a module.
PyMODINIT_FUNC PyInit__CUDA(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_CUDA", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
