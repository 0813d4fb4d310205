// Argument checks of operators on rows, for all devices: softmax, cross-entropy, norms.
#pragma once

#include "checks.h"

namespace megalite {

inline void check_logits(
    const torch::stable::Tensor& logits, const torch::stable::Tensor& targets, int64_t num_real) {
  STD_TORCH_CHECK(
      logits.dim() >= 1 && logits.is_contiguous(), "cross_entropy: logits must be contiguous, [..., columns]");
  const int64_t columns = logits.size(logits.dim() - 1);
  STD_TORCH_CHECK(
      targets.device() == logits.device() && targets.scalar_type() == torch::headeronly::ScalarType::Long &&
          targets.numel() * columns == logits.numel(),
      "cross_entropy: targets must be int64 on the logits' device, one for each row of logits");
  STD_TORCH_CHECK(0 <= num_real && num_real <= columns, "cross_entropy: num_real is out of range");
}

inline void check_statistics(
    const torch::stable::Tensor& logits, const torch::stable::Tensor& statistics, const torch::stable::Tensor& grad,
    int64_t rows) {
  const auto fits = [&](const torch::stable::Tensor& tensor, int64_t numel) {
    return tensor.device() == logits.device() && tensor.numel() == numel && tensor.scalar_type() == computed_in(logits);
  };
  STD_TORCH_CHECK(
      fits(statistics, 2 * rows) && fits(grad, rows),
      "cross_entropy: statistics must be [2, rows] and grad [rows], in fp32, or fp64 for fp64");
}

inline void check_scores(const torch::stable::Tensor& scores, int64_t first, int64_t seq_length) {
  STD_TORCH_CHECK(scores.dim() == 4 && scores.is_contiguous(), "causal_softmax: scores must be contiguous, 4-D");
  STD_TORCH_CHECK(
      first >= 0 && first + scores.size(2) <= scores.size(3) && scores.size(3) <= seq_length,
      "causal_softmax: a query lies beyond the keys, or a key beyond the sequence");
}

// The data of an optional tensor beside the scores; null if it is absent.
template <class Element>
const Element* checked_elements(
    const torch::stable::Tensor& scores, const std::optional<torch::stable::Tensor>& tensor, int64_t numel,
    const char* what) {
  using torch::headeronly::ScalarType;
  if (!tensor) return nullptr;
  constexpr auto dtype = std::is_same_v<Element, double> ? ScalarType::Double : ScalarType::Long;
  STD_TORCH_CHECK(
      tensor->device() == scores.device() && tensor->is_contiguous() && tensor->numel() == numel &&
          tensor->scalar_type() == dtype,
      "causal_softmax: ", what, " must be contiguous ", dtype == ScalarType::Double ? "fp64" : "int64",
      " on the scores' device, with ", numel, " elements");
  return static_cast<const Element*>(tensor->const_data_ptr());
}

inline void check_weights_gradient(
    const torch::stable::Tensor& scores, const torch::stable::Tensor& grad, const torch::stable::Tensor& log_sums) {
  STD_TORCH_CHECK(
      grad.is_contiguous() && grad.numel() == scores.numel() && is_like(grad, scores),
      "causal_softmax_backward_: grad must be contiguous, and as scores");
  STD_TORCH_CHECK(
      log_sums.is_contiguous() && log_sums.device() == scores.device() &&
          log_sums.numel() == scores.size(0) * scores.size(1) * scores.size(2) &&
          log_sums.scalar_type() == computed_in(scores),
      "causal_softmax_backward_: log_sums must be what causal_softmax_ returned");
}

inline void check_norm(const torch::stable::Tensor& x, const torch::stable::Tensor& weight) {
  STD_TORCH_CHECK(
      x.dim() >= 1 && is_like(weight, x) && weight.numel() == x.size(x.dim() - 1),
      "norm: weight and bias must be [h], of x's dtype and device");
}

}  // namespace megalite
