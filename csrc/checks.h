// Argument checks of operators, for all devices: nothing but the dispatcher has checked them before.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

namespace megalite {

inline int64_t rows_of(const torch::stable::Tensor& x) {
  const int64_t columns = x.size(x.dim() - 1);
  return columns == 0 ? 0 : x.numel() / columns;
}

// The dtype of computations with a tensor.
inline torch::headeronly::ScalarType computed_in(const torch::stable::Tensor& tensor) {
  using torch::headeronly::ScalarType;
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline bool is_beside(const torch::stable::Tensor& tensor, const torch::stable::Tensor& x) {
  return tensor.device() == x.device();
}

inline bool is_like(const torch::stable::Tensor& tensor, const torch::stable::Tensor& x) {
  return is_beside(tensor, x) && tensor.scalar_type() == x.scalar_type();
}

inline void check_bias(
    const char* op, const torch::stable::Tensor& x, const std::optional<torch::stable::Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x must be [..., n]");
  STD_TORCH_CHECK(
      !bias || (is_like(*bias, x) && bias->numel() == x.size(x.dim() - 1)), op,
      ": bias must have as many elements as x has columns, and x's dtype and device");
}

// x has `halves` columns for each column of the output.
inline void check_activation(
    const char* op, const torch::stable::Tensor& x, const std::optional<torch::stable::Tensor>& bias, int64_t halves) {
  check_bias(op, x, bias);
  STD_TORCH_CHECK(x.size(x.dim() - 1) % halves == 0, op, ": x must be [..., ", halves, " n]");
}

inline void check_gradient(
    const char* op, const torch::stable::Tensor& grad, const torch::stable::Tensor& x, int64_t halves = 1) {
  STD_TORCH_CHECK(
      is_like(grad, x) && halves * grad.numel() == x.numel(), op,
      ": grad must have the output's elements, and x's dtype and device");
}

inline void check_samples(
    const char* op, const torch::stable::Tensor& x, const torch::stable::Tensor& sample_numbers) {
  STD_TORCH_CHECK(
      is_beside(sample_numbers, x) && sample_numbers.dim() == 1 &&
          sample_numbers.scalar_type() == torch::headeronly::ScalarType::Long && sample_numbers.numel() == x.size(1),
      op, ": sample_numbers must be int64 [b] on x's device");
}

inline void check_hidden(
    const char* op, const torch::stable::Tensor& x, const torch::stable::Tensor& sample_numbers) {
  STD_TORCH_CHECK(x.dim() == 3, op, ": x must be [n, b, h]");
  check_samples(op, x, sample_numbers);
}

inline void check_residual(
    const char* op, const torch::stable::Tensor& x, const torch::stable::Tensor& residual) {
  bool fits = is_like(residual, x) && residual.dim() == x.dim();
  for (int64_t dim = 0; fits && dim < x.dim(); ++dim) fits = residual.size(dim) == x.size(dim);
  STD_TORCH_CHECK(fits, op, ": residual must be as x");
}

inline void check_tables(
    const torch::stable::Tensor& x, const torch::stable::Tensor& cosine, const torch::stable::Tensor& sine) {
  STD_TORCH_CHECK(x.dim() == 4 && x.size(3) % 2 == 0, "rotate: x must be [s, b, n, d] with an even d");
  const auto fits = [&](const torch::stable::Tensor& table) {
    return is_beside(table, x) && table.dim() == 4 && table.size(0) == x.size(0) && table.size(2) == 1 &&
           table.size(3) == x.size(3) && (table.size(1) == 1 || table.size(1) == x.size(1)) &&
           table.size(1) == cosine.size(1);
  };
  STD_TORCH_CHECK(fits(cosine) && fits(sine), "rotate: cosine and sine must be [s, b or 1, 1, d] on x's device");
  STD_TORCH_CHECK(
      cosine.scalar_type() == computed_in(x) && sine.scalar_type() == computed_in(x),
      "rotate: cosine and sine must be in fp32, or fp64 for fp64");
}

inline void check_fill(const torch::stable::Tensor& out, int64_t run_length) {
  STD_TORCH_CHECK(out.is_contiguous(), "fill_normal_: out must be contiguous");
  STD_TORCH_CHECK(run_length > 0, "fill_normal_: run_length must be positive");
}

}  // namespace megalite
