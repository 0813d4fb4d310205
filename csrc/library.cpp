// The compiled library of kernels, on torch's stable ABI: one build works with torch 2.11 and later and any Python 3.
// Importing it registers its kernels with the operators that megalite/kernels/*.py define.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "cpu/isa.h"
#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, library) {
  library.impl("bias_dropout_add", TORCH_BOX(&megalite::cpu::bias_dropout_add));
  library.impl("bias_dropout_add_backward", TORCH_BOX(&megalite::cpu::bias_dropout_add_backward));
  library.impl("bias_gelu", TORCH_BOX(&megalite::cpu::bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&megalite::cpu::bias_gelu_backward));
  library.impl("causal_softmax_", TORCH_BOX(&megalite::cpu::causal_softmax_));
  library.impl("causal_softmax_backward_", TORCH_BOX(&megalite::cpu::causal_softmax_backward_));
  library.impl("bias_swiglu", TORCH_BOX(&megalite::cpu::bias_swiglu));
  library.impl("bias_swiglu_backward", TORCH_BOX(&megalite::cpu::bias_swiglu_backward));
  library.impl("cross_entropy_statistics", TORCH_BOX(&megalite::cpu::cross_entropy_statistics));
  library.impl("cross_entropy_gradient_", TORCH_BOX(&megalite::cpu::cross_entropy_gradient_));
  library.impl("dropout", TORCH_BOX(&megalite::cpu::dropout));
  library.impl("fill_normal_", TORCH_BOX(&megalite::cpu::fill_normal_));
  library.impl("rms_norm", TORCH_BOX(&megalite::cpu::rms_norm));
  library.impl("rms_norm_backward", TORCH_BOX(&megalite::cpu::rms_norm_backward));
  library.impl("rotate", TORCH_BOX(&megalite::cpu::rotate));
  library.impl("round_moments_", TORCH_BOX(&megalite::cpu::round_moments_));
}

namespace {

PyObject* capability(PyObject*, PyObject*) {
  const char* const names[] = {"default", "avx2", "avx512"};
  return PyUnicode_FromString(names[static_cast<int>(megalite::cpu::chosen_isa())]);
}

PyMethodDef methods[] = {
    {"capability", capability, METH_NOARGS, "The instructions that the kernels were chosen for."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// Python imports a shared library only if it is a module.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
