// The operators' C++ signatures; their schemas stand in megalite/kernels/*.py, which hold without this library too.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace megalite::cpu {

torch::stable::Tensor dropout(
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& sample_numbers,
    double p,
    int64_t key,
    int64_t base,
    int64_t stride);

void fill_normal_(
    torch::stable::Tensor out,
    double std,
    double mean,
    int64_t key,
    int64_t base,
    int64_t run_length,
    int64_t run_stride);

}  // namespace megalite::cpu
