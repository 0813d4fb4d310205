// The compiled library of kernels, on torch's stable ABI: one build serves torch 2.11 and later and each Python 3.
// Importing it registers its kernels with operators that megalite/kernels/*.py define.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, library) {
  library.impl("dropout", TORCH_BOX(&megalite::cpu::dropout));
  library.impl("fill_normal_", TORCH_BOX(&megalite::cpu::fill_normal_));
}

// Python imports a shared library only if it is a module: this one is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
