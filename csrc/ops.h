// The operators' C++ signatures. Their schemas are in megalite/kernels/*.py and also exist without this library.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

// The part of the library that declares them; csrc/cuda defines `cuda` before it includes this.
#ifndef MEGALITE_DEVICE
#define MEGALITE_DEVICE cpu
#endif

namespace megalite::MEGALITE_DEVICE {

void adamw_(
    const std::vector<torch::stable::Tensor>& main,
    const std::vector<torch::stable::Tensor>& exp_avg,
    const std::vector<torch::stable::Tensor>& exp_avg_sq,
    const std::vector<torch::stable::Tensor>& rounded,
    const std::vector<torch::stable::Tensor>& gradients,
    const torch::stable::Tensor& number,
    const std::optional<torch::stable::Tensor>& divisor,
    const torch::stable::Tensor& is_good,
    double learning_rate,
    double beta1,
    double beta2,
    double weight_decay,
    double epsilon);  // not on the CPU, where PyTorch's is as fast

torch::stable::Tensor add_weight_and_bias_gradient_(
    torch::stable::Tensor total,
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& x,
    bool overwrite);  // not on the CPU, as above

torch::stable::Tensor bias_dropout_add(
    const torch::stable::Tensor& x,
    const std::optional<torch::stable::Tensor>& bias,
    const torch::stable::Tensor& residual,
    const torch::stable::Tensor& sample_numbers,
    double p,
    int64_t key,
    int64_t base);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> bias_dropout_add_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& sample_numbers,
    double p,
    int64_t key,
    int64_t base);

// Not on the CPU, where it is two operators.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> bias_dropout_add_norm(
    const torch::stable::Tensor& x,
    const std::optional<torch::stable::Tensor>& bias,
    const torch::stable::Tensor& residual,
    const torch::stable::Tensor& sample_numbers,
    double p,
    int64_t key,
    int64_t base,
    const torch::stable::Tensor& weight,
    const std::optional<torch::stable::Tensor>& norm_bias,
    double epsilon);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> bias_dropout_add_norm_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& sum_grad,
    const torch::stable::Tensor& sum,
    const torch::stable::Tensor& weight,
    bool centres,
    double epsilon,
    const torch::stable::Tensor& sample_numbers,
    double p,
    int64_t key,
    int64_t base);

torch::stable::Tensor bias_gelu(
    const torch::stable::Tensor& x,
    const std::optional<torch::stable::Tensor>& bias);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> bias_gelu_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& x,
    const std::optional<torch::stable::Tensor>& bias);

torch::stable::Tensor causal_softmax_(
    torch::stable::Tensor scores,
    const std::optional<torch::stable::Tensor>& slopes,
    const std::optional<torch::stable::Tensor>& starts,
    const std::optional<torch::stable::Tensor>& ends,
    const std::optional<torch::stable::Tensor>& samples,
    double scale,
    double p,
    int64_t key,
    int64_t base,
    int64_t first,
    int64_t seq_length);

void causal_softmax_backward_(
    torch::stable::Tensor scores,
    torch::stable::Tensor grad,
    const torch::stable::Tensor& log_sums,
    const std::optional<torch::stable::Tensor>& slopes,
    const std::optional<torch::stable::Tensor>& starts,
    const std::optional<torch::stable::Tensor>& ends,
    const std::optional<torch::stable::Tensor>& samples,
    double scale,
    double p,
    int64_t key,
    int64_t base,
    int64_t first,
    int64_t seq_length);

torch::stable::Tensor bias_swiglu(
    const torch::stable::Tensor& x,
    const std::optional<torch::stable::Tensor>& bias);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> bias_swiglu_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& x,
    const std::optional<torch::stable::Tensor>& bias);

torch::stable::Tensor cross_entropy_statistics(
    const torch::stable::Tensor& logits,
    const torch::stable::Tensor& targets,
    int64_t start,
    int64_t num_real);

void cross_entropy_gradient_(
    torch::stable::Tensor logits,
    const torch::stable::Tensor& targets,
    const torch::stable::Tensor& statistics,
    const torch::stable::Tensor& grad,
    int64_t start,
    int64_t num_real);

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

// Not on the CPU: two operators are as fast.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> gelu_linear_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& weight,
    const torch::stable::Tensor& before,
    bool has_bias);

torch::stable::Tensor layer_norm(
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& weight,
    const torch::stable::Tensor& bias,
    double epsilon);  // not on the CPU, where PyTorch's is as fast

std::tuple<torch::stable::Tensor, torch::stable::Tensor> layer_norm_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& weight,
    double epsilon,
    const std::optional<torch::stable::Tensor>& residual_grad);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> linear_gelu(
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& weight,
    const std::optional<torch::stable::Tensor>& bias);  // not on the CPU, as above

torch::stable::Tensor rms_norm(
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& weight,
    double epsilon);

std::tuple<torch::stable::Tensor, torch::stable::Tensor> rms_norm_backward(
    const torch::stable::Tensor& grad,
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& weight,
    double epsilon,
    const std::optional<torch::stable::Tensor>& residual_grad);

torch::stable::Tensor rotate(
    const torch::stable::Tensor& x,
    const torch::stable::Tensor& cosine,
    const torch::stable::Tensor& sine,
    bool inverse);

void round_moments_(
    const torch::stable::Tensor& exp_avg,
    const torch::stable::Tensor& exp_avg_sq,
    const std::optional<torch::stable::Tensor>& rounded,
    const std::optional<torch::stable::Tensor>& rounded_sq,
    const torch::stable::Tensor& number,
    int64_t key,
    int64_t base,
    int64_t first,
    int64_t run_length,
    int64_t run_stride);  // not on a GPU, which runs a Triton kernel

}  // namespace megalite::MEGALITE_DEVICE
