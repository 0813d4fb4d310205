// Bindings from tensors to pointers: softmax, cross-entropy, norms.
#include "bindings.h"

#include <algorithm>

#include "../row_checks.h"

namespace megalite::cuda::ops {
namespace {

const int64_t* numbers_of(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.const_data_ptr()); }

Scores scores_of(
    const Tensor& scores, const std::optional<Tensor>& slopes, const std::optional<Tensor>& starts,
    const std::optional<Tensor>& ends, const std::optional<Tensor>& samples, double scale, double p, int64_t base,
    int64_t first, int64_t seq_length) {
  check_scores(scores, first, seq_length);
  STD_TORCH_CHECK(p == 0.0 || samples.has_value(), "causal_softmax: dropout needs sample numbers");
  const int64_t num_samples = scores.size(0), num_heads = scores.size(1);
  return {
      num_heads, scores.size(2), scores.size(3), first, seq_length, base, scale,
      checked_elements<double>(scores, slopes, num_heads, "slopes"),
      checked_elements<int64_t>(scores, starts, num_samples * seq_length, "starts"),
      checked_elements<int64_t>(scores, ends, num_samples * seq_length, "ends"),
      checked_elements<int64_t>(scores, samples, num_samples, "samples")};
}

Tensor normalised(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Norm kind) {
  check_norm(x, weight);
  if (bias) check_norm(x, *bias);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), scale = torch::stable::contiguous(weight);
  const auto added = dense(bias);
  auto out = torch::stable::new_empty(input, input.sizes());
  cuda::norm(
      dtype_of(x), kind, input.const_data_ptr(), scale.const_data_ptr(), data_of(added), out.mutable_data_ptr(),
      rows_of(x), x.size(x.dim() - 1), place.stream());
  return out;
}

std::tuple<Tensor, Tensor> norm_gradients(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& residual_grad, Norm kind) {
  check_norm(x, weight);
  check_gradient("norm", grad, x);
  if (residual_grad) check_gradient("norm", *residual_grad, x);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), upper = torch::stable::contiguous(grad);
  const auto scale = torch::stable::contiguous(weight);
  const auto added = dense(residual_grad);
  const int64_t rows = rows_of(x), columns = x.size(x.dim() - 1), num_sums = kind.centres ? 2 * columns : columns;
  auto out = torch::stable::new_empty(input, input.sizes());
  auto sums = torch::stable::new_empty(input, {num_sums});
  auto workspace = torch::stable::new_empty(input, {num_norm_parts(rows) * num_sums}, computed_in(x));
  cuda::norm_backward(
      dtype_of(x), kind, upper.const_data_ptr(), input.const_data_ptr(), scale.const_data_ptr(), data_of(added),
      out.mutable_data_ptr(), sums.mutable_data_ptr(), workspace.mutable_data_ptr(), rows, columns, place.stream());
  return {out, sums};
}

}  // namespace

Tensor causal_softmax_(
    Tensor scores, const std::optional<Tensor>& slopes, const std::optional<Tensor>& starts,
    const std::optional<Tensor>& ends, const std::optional<Tensor>& samples, double scale, double p, int64_t key,
    int64_t base, int64_t first, int64_t seq_length) {
  const Scores problem = scores_of(scores, slopes, starts, ends, samples, scale, p, base, first, seq_length);
  const Place place(scores);
  auto log_sums = torch::stable::new_empty(
      scores, {scores.size(0), scores.size(1), scores.size(2)}, computed_in(scores));
  cuda::causal_softmax(
      dtype_of(scores), scores.mutable_data_ptr(), log_sums.mutable_data_ptr(), log_sums.numel(), problem,
      mask_of(p, key), place.stream());
  return log_sums;
}

void causal_softmax_backward_(
    Tensor scores, Tensor grad, const Tensor& log_sums, const std::optional<Tensor>& slopes,
    const std::optional<Tensor>& starts, const std::optional<Tensor>& ends, const std::optional<Tensor>& samples,
    double scale, double p, int64_t key, int64_t base, int64_t first, int64_t seq_length) {
  const Scores problem = scores_of(scores, slopes, starts, ends, samples, scale, p, base, first, seq_length);
  check_weights_gradient(scores, grad, log_sums);
  const Place place(scores);
  cuda::causal_softmax_backward(
      dtype_of(scores), scores.mutable_data_ptr(), grad.mutable_data_ptr(), log_sums.const_data_ptr(),
      log_sums.numel(), problem, mask_of(p, key), place.stream());
}

Tensor cross_entropy_statistics(const Tensor& logits, const Tensor& targets, int64_t start, int64_t num_real) {
  check_logits(logits, targets, num_real);
  const Place place(logits);
  const auto numbers = torch::stable::contiguous(targets);
  const int64_t rows = targets.numel(), columns = logits.size(logits.dim() - 1);
  auto out = torch::stable::new_empty(logits, {3, rows}, computed_in(logits));
  cuda::cross_entropy_statistics(
      dtype_of(logits), logits.const_data_ptr(), numbers_of(numbers), out.mutable_data_ptr(), rows,
      {columns, start, num_real}, place.stream());
  return out;
}

void cross_entropy_gradient_(
    Tensor logits, const Tensor& targets, const Tensor& statistics, const Tensor& grad, int64_t start,
    int64_t num_real) {
  check_logits(logits, targets, num_real);
  const int64_t rows = targets.numel(), columns = logits.size(logits.dim() - 1);
  check_statistics(logits, statistics, grad, rows);
  const Place place(logits);
  const auto numbers = torch::stable::contiguous(targets), found = torch::stable::contiguous(statistics);
  const auto upper = torch::stable::contiguous(grad);
  cuda::cross_entropy_gradient(
      dtype_of(logits), logits.mutable_data_ptr(), numbers_of(numbers), found.const_data_ptr(),
      upper.const_data_ptr(), rows, {columns, start, num_real}, place.stream());
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon) {
  return normalised(x, weight, bias, {true, epsilon});
}

std::tuple<Tensor, Tensor> layer_norm_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, double epsilon,
    const std::optional<Tensor>& residual_grad) {
  return norm_gradients(grad, x, weight, residual_grad, {true, epsilon});
}

std::tuple<Tensor, Tensor> bias_dropout_add_norm(
    const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual, const Tensor& sample_numbers,
    double p, int64_t key, int64_t base, const Tensor& weight, const std::optional<Tensor>& norm_bias,
    double epsilon) {
  const char* op = "bias_dropout_add_norm";
  check_hidden(op, x, sample_numbers);
  check_residual(op, x, residual);
  check_bias(op, x, bias);
  check_norm(x, weight);
  if (norm_bias) check_norm(x, *norm_bias);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), before = torch::stable::contiguous(residual);
  const auto samples = torch::stable::contiguous(sample_numbers), scale = torch::stable::contiguous(weight);
  const auto added = dense(bias), shift = dense(norm_bias);
  auto sum = torch::stable::new_empty(input, input.sizes()), out = torch::stable::new_empty(input, input.sizes());
  cuda::bias_dropout_add_norm(
      dtype_of(x), {norm_bias.has_value(), epsilon}, input.const_data_ptr(), data_of(added), before.const_data_ptr(),
      scale.const_data_ptr(), data_of(shift), sum.mutable_data_ptr(), out.mutable_data_ptr(), rows_of(x), x.size(2),
      {numbers_of(samples), x.size(1), base, x.size(2)}, mask_of(p, key), place.stream());
  return {out, sum};
}

std::tuple<Tensor, Tensor, Tensor> bias_dropout_add_norm_backward(
    const Tensor& grad, const Tensor& sum_grad, const Tensor& sum, const Tensor& weight, bool centres, double epsilon,
    const Tensor& sample_numbers, double p, int64_t key, int64_t base) {
  const char* op = "bias_dropout_add_norm";
  check_hidden(op, sum, sample_numbers);
  check_norm(sum, weight);
  check_gradient(op, grad, sum);
  check_gradient(op, sum_grad, sum);
  const Place place(sum);
  const auto input = torch::stable::contiguous(sum), upper = torch::stable::contiguous(grad);
  const auto beside = torch::stable::contiguous(sum_grad), scale = torch::stable::contiguous(weight);
  const auto samples = torch::stable::contiguous(sample_numbers);
  const int64_t rows = rows_of(sum), columns = sum.size(2), num_sums = (centres ? 3 : 2) * columns;
  auto residual_grad = torch::stable::new_empty(input, input.sizes());
  auto x_grad = p == 0.0 ? torch::stable::new_empty(input, {0}) : torch::stable::new_empty(input, input.sizes());
  auto parameter_grads = torch::stable::new_empty(input, {num_sums});
  const int64_t num_parts = num_norm_parts(rows) * num_sums;
  const int64_t num_bias_parts = max_sum_parts(dtype_of(sum), rows, columns) * columns;
  auto workspace = torch::stable::new_empty(input, {std::max(num_parts, num_bias_parts)}, computed_in(sum));
  cuda::bias_dropout_add_norm_backward(
      dtype_of(sum), {centres, epsilon}, upper.const_data_ptr(), beside.const_data_ptr(), input.const_data_ptr(),
      scale.const_data_ptr(), residual_grad.mutable_data_ptr(), p == 0.0 ? nullptr : x_grad.mutable_data_ptr(),
      parameter_grads.mutable_data_ptr(), workspace.mutable_data_ptr(), rows, columns,
      {numbers_of(samples), sum.size(1), base, columns}, mask_of(p, key), place.stream());
  return {residual_grad, x_grad, parameter_grads};
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  return normalised(x, weight, std::nullopt, {false, epsilon});
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, double epsilon,
    const std::optional<Tensor>& residual_grad) {
  return norm_gradients(grad, x, weight, residual_grad, {false, epsilon});
}

}  // namespace megalite::cuda::ops
