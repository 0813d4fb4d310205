// Bindings from tensors to pointers: activations, dropout, rotary embedding, initial weights, AdamW.
#include <vector>

#include "bindings.h"

namespace megalite::cuda::ops {
namespace {

// A tensor with the shape of x except for the last dim.
Tensor new_like(const Tensor& x, int64_t columns) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  return torch::stable::new_empty(x, sizes);
}

template <class T>
const T* scalar_of(const Tensor& tensor, torch::headeronly::ScalarType dtype, const Tensor& x) {
  STD_TORCH_CHECK(
      is_beside(tensor, x) && tensor.numel() == 1 && tensor.scalar_type() == dtype,
      "adamw_: number must be an fp32, divisor an fp64 and is_good a bool scalar on the weights' device");
  return static_cast<const T*>(tensor.const_data_ptr());
}

}  // namespace

Tensor bias_gelu(const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_gelu", x, bias, 1);
  const Place place(x);
  const auto input = torch::stable::contiguous(x);
  const auto added = dense(bias);
  auto out = torch::stable::new_empty(input, input.sizes());
  cuda::bias_gelu(
      dtype_of(x), input.const_data_ptr(), data_of(added), out.mutable_data_ptr(), rows_of(x), x.size(x.dim() - 1),
      place.stream());
  return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(
    const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_gelu", x, bias, 1);
  check_gradient("bias_gelu", grad, x);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), upper = torch::stable::contiguous(grad);
  const auto added = dense(bias);
  const int64_t rows = rows_of(x), columns = x.size(x.dim() - 1);
  auto out = torch::stable::new_empty(input, input.sizes());
  auto sums = torch::stable::new_empty(input, {columns});
  auto workspace = new_workspace(input, rows, columns);
  cuda::bias_gelu_backward(
      dtype_of(x), upper.const_data_ptr(), input.const_data_ptr(), data_of(added), out.mutable_data_ptr(),
      sums.mutable_data_ptr(), workspace.mutable_data_ptr(), rows, columns, place.stream());
  return {out, sums};
}

Tensor bias_swiglu(const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_swiglu", x, bias, 2);
  const Place place(x);
  const auto input = torch::stable::contiguous(x);
  const auto added = dense(bias);
  const int64_t columns = x.size(x.dim() - 1) / 2;
  auto out = new_like(input, columns);
  cuda::bias_swiglu(
      dtype_of(x), input.const_data_ptr(), data_of(added), out.mutable_data_ptr(), rows_of(x), columns,
      place.stream());
  return out;
}

std::tuple<Tensor, Tensor> bias_swiglu_backward(
    const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias) {
  check_activation("bias_swiglu", x, bias, 2);
  check_gradient("bias_swiglu", grad, x, 2);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), upper = torch::stable::contiguous(grad);
  const auto added = dense(bias);
  const int64_t rows = rows_of(x), columns = x.size(x.dim() - 1) / 2;
  auto out = torch::stable::new_empty(input, input.sizes());
  auto sums = torch::stable::new_empty(input, {2 * columns});
  auto workspace = new_workspace(input, rows, columns, 2);
  cuda::bias_swiglu_backward(
      dtype_of(x), upper.const_data_ptr(), input.const_data_ptr(), data_of(added), out.mutable_data_ptr(),
      sums.mutable_data_ptr(), workspace.mutable_data_ptr(), rows, columns, place.stream());
  return {out, sums};
}

Tensor dropout(
    const Tensor& x, const Tensor& sample_numbers, double p, int64_t key, int64_t base, int64_t stride) {
  STD_TORCH_CHECK(x.dim() >= 2, "dropout: x must be [outer, b, ...]");
  check_samples("dropout", x, sample_numbers);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), samples = torch::stable::contiguous(sample_numbers);
  auto out = torch::stable::new_empty(input, input.sizes());
  if (x.numel() == 0) return out;
  const int64_t rows = x.size(0) * x.size(1);
  const Site site{static_cast<const int64_t*>(samples.const_data_ptr()), x.size(1), base, stride};
  cuda::dropout(
      dtype_of(x), input.const_data_ptr(), out.mutable_data_ptr(), rows, x.numel() / rows, site, mask_of(p, key),
      place.stream());
  return out;
}

Tensor bias_dropout_add(
    const Tensor& x, const std::optional<Tensor>& bias, const Tensor& residual, const Tensor& sample_numbers,
    double p, int64_t key, int64_t base) {
  check_hidden("bias_dropout_add", x, sample_numbers);
  check_residual("bias_dropout_add", x, residual);
  check_bias("bias_dropout_add", x, bias);
  const Place place(x);
  const auto input = torch::stable::contiguous(x), before = torch::stable::contiguous(residual);
  const auto samples = torch::stable::contiguous(sample_numbers);
  const auto added = dense(bias);
  const int64_t columns = x.size(2);
  auto out = torch::stable::new_empty(input, input.sizes());
  const Site site{static_cast<const int64_t*>(samples.const_data_ptr()), x.size(1), base, columns};
  cuda::bias_dropout_add(
      dtype_of(x), input.const_data_ptr(), data_of(added), before.const_data_ptr(), out.mutable_data_ptr(),
      rows_of(x), columns, site, mask_of(p, key), place.stream());
  return out;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(
    const Tensor& grad, const Tensor& sample_numbers, double p, int64_t key, int64_t base) {
  check_hidden("bias_dropout_add", grad, sample_numbers);
  const Place place(grad);
  const auto upper = torch::stable::contiguous(grad), samples = torch::stable::contiguous(sample_numbers);
  const int64_t rows = rows_of(grad), columns = grad.size(2);
  auto out = torch::stable::new_empty(upper, upper.sizes());
  auto sums = torch::stable::new_empty(upper, {columns});
  auto workspace = new_workspace(upper, rows, columns);
  const Site site{static_cast<const int64_t*>(samples.const_data_ptr()), grad.size(1), base, columns};
  cuda::bias_dropout_add_backward(
      dtype_of(grad), upper.const_data_ptr(), out.mutable_data_ptr(), sums.mutable_data_ptr(),
      workspace.mutable_data_ptr(), rows, columns, site, mask_of(p, key), place.stream());
  return {out, sums};
}

void adamw_(
    const std::vector<Tensor>& main, const std::vector<Tensor>& exp_avg, const std::vector<Tensor>& exp_avg_sq,
    const std::vector<Tensor>& rounded, const std::vector<Tensor>& gradients, const Tensor& number,
    const std::optional<Tensor>& divisor, const Tensor& is_good, double learning_rate, double beta1, double beta2,
    double weight_decay, double epsilon) {
  using torch::headeronly::ScalarType;
  const size_t num = main.size();
  STD_TORCH_CHECK(
      exp_avg.size() == num && exp_avg_sq.size() == num && gradients.size() == num &&
          (rounded.empty() || rounded.size() == num),
      "adamw_: the lists must be equally long");
  if (num == 0) return;
  const Place place(main[0]);
  const Rates rates{learning_rate, beta1, beta2, weight_decay, epsilon};
  const Scalars scalars{
      scalar_of<float>(number, ScalarType::Float, main[0]),
      divisor ? scalar_of<double>(*divisor, ScalarType::Double, main[0]) : nullptr,
      scalar_of<bool>(is_good, ScalarType::Bool, main[0])};
  for (size_t i = 0; i < num; ++i) {
    const Tensor& weight = rounded.empty() ? main[i] : rounded[i];
    STD_TORCH_CHECK(weight.is_contiguous(), "adamw_: tensors must be contiguous");
    for (const Tensor* tensor : {&main[i], &exp_avg[i], &exp_avg_sq[i], &gradients[i]}) {
      STD_TORCH_CHECK(
          is_beside(*tensor, main[0]) && is_beside(*tensor, weight) && tensor->is_contiguous() &&
              tensor->numel() == weight.numel() && tensor->scalar_type() == computed_in(weight),
          "adamw_: main, exp_avg, exp_avg_sq and gradients must be contiguous, of as many elements as rounded, in "
          "fp32, or fp64 without rounded");
    }
    cuda::adamw(
        dtype_of(weight), main[i].mutable_data_ptr(), exp_avg[i].mutable_data_ptr(), exp_avg_sq[i].mutable_data_ptr(),
        rounded.empty() ? nullptr : rounded[i].mutable_data_ptr(), gradients[i].const_data_ptr(), weight.numel(),
        rates, scalars, place.stream());
  }
}

void fill_normal_(
    Tensor out, double std, double mean, int64_t key, int64_t base, int64_t run_length, int64_t run_stride) {
  check_fill(out, run_length);
  const Place place(out);
  cuda::fill_normal(
      dtype_of(out), out.mutable_data_ptr(), out.numel(), std, mean, static_cast<uint64_t>(key), base, run_length,
      run_stride, place.stream());
}

Tensor rotate(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse) {
  check_tables(x, cosine, sine);
  const Place place(x);
  const auto input = x.stride(3) == 1 ? x : torch::stable::contiguous(x);  // a slice of heads is read in place
  const auto cosines = torch::stable::contiguous(cosine), sines = torch::stable::contiguous(sine);
  auto out = torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)});
  const Heads shape{
      x.size(0), x.size(1), x.size(2), x.size(3), {input.stride(0), input.stride(1), input.stride(2)}, cosine.size(1)};
  cuda::rotate(
      dtype_of(x), input.const_data_ptr(), cosines.const_data_ptr(), sines.const_data_ptr(), out.mutable_data_ptr(),
      shape, inverse, place.stream());
  return out;
}

}  // namespace megalite::cuda::ops
