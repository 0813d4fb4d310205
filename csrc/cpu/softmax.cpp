// Causal softmax of attention scores on the CPU; see megalite/kernels/softmax.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "../ops.h"
#include "../row_checks.h"
#include "dtype.h"
#include "elementary.h"
#include "isa.h"
#include "mask.h"

namespace megalite::cpu {
namespace {

constexpr int kLanes = 32;           // partial maxima and sums: their order is the same on every processor
constexpr int64_t kGrain = 1 << 14;  // minimum number of scores per thread

// Scores are [b, n, rows, keys]. Pointers of absent arguments are null.
struct Problem {
  int64_t num_heads, rows, keys;
  double scale;
  const double* slopes;
  const int64_t* starts;
  const int64_t* ends;
  const int64_t* samples;
  bool drops;
  Mask mask;
  int64_t base, first, seq_length;
};

// The keys of one query: `count` keys from `begin` on; key number `own` is at the query's own position.
struct Row {
  int64_t begin, count, own;
  double slope;
  uint64_t sample, index;  // for dropout: the sample, and the index of the first key's weight in it
};

Row row_at(const Problem& problem, int64_t number) {
  const int64_t query = problem.first + number % problem.rows;
  const int64_t head = number / problem.rows % problem.num_heads;
  const int64_t sample = number / (problem.rows * problem.num_heads);
  const int64_t given = problem.starts ? problem.starts[sample * problem.seq_length + query] : 0;
  const int64_t begin = std::clamp<int64_t>(given, 0, query);  // never read outside of the row, whatever `starts` is
  const int64_t last = problem.ends ? problem.ends[sample * problem.seq_length + query] : query + 1;
  const int64_t end = std::clamp<int64_t>(last, query + 1, problem.keys);
  const int64_t before = problem.base + (head * problem.seq_length + query) * problem.seq_length;
  return {
      begin, end - begin, query - begin, problem.slopes ? problem.slopes[head] : 0.0,
      problem.samples ? static_cast<uint64_t>(problem.samples[sample]) : 0, static_cast<uint64_t>(before + begin)};
}

// The scaled and biased scores of a row's keys.
template <class T>
MEGALITE_INLINE void load_row(Wide<T>* __restrict x, const T* __restrict scores, const Row& row, double scale) {
  const auto factor = static_cast<Wide<T>>(scale), slope = static_cast<Wide<T>>(row.slope);
  const int count = static_cast<int>(row.count), own = static_cast<int>(row.own);
  for (int i = 0; i < count; ++i) x[i] = widen(scores[i]) * factor + slope * static_cast<Wide<T>>(i - own);
}

template <class W>
MEGALITE_INLINE W maximum(const W* __restrict x, int64_t count) {
  W lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<W>::infinity());
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[at + lane] > lanes[lane] ? x[at + lane] : lanes[lane];
  }
  for (; at < count; ++at) lanes[0] = std::max(lanes[0], x[at]);
  return *std::max_element(lanes, lanes + kLanes);
}

// The sum of x[i] * y[i], in an order that only depends on `count`.
template <class W>
MEGALITE_INLINE W dot(const W* __restrict x, const W* __restrict y, int64_t count) {
  W lanes[kLanes] = {};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[at + lane] * y[at + lane];
  }
  for (; at < count; ++at) lanes[at % kLanes] += x[at] * y[at];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class W>
MEGALITE_INLINE void exponentiate(W* __restrict x, int64_t count, W subtrahend) {
  for (int64_t i = 0; i < count; ++i) x[i] = exp_of(x[i] - subtrahend);
}

// The dropout factor of each weight of a row: 0 or 1 / (1 - p).
template <class W>
MEGALITE_INLINE void keep_factors(W* __restrict factors, const Row& row, const Mask& mask) {
  const auto kept = static_cast<W>(mask.scale);
  const uint32_t threshold = mask.threshold;
  for_words(row.count, row.index, row.sample, mask.key, [&](int64_t at, int num, const uint32_t* words) MEGALITE_BODY {
    for (int i = 0; i < num; ++i) factors[at + i] = words[i] >= threshold ? kept : W{0};
  });
}

// Stores a row's weights, and zeros at keys that it does not see.
template <class T>
MEGALITE_INLINE void store_row(T* __restrict out, const Wide<T>* __restrict x, const Row& row, int64_t keys) {
  std::fill_n(out, row.begin, narrow<T>(0));
  for (int64_t i = 0; i < row.count; ++i) out[row.begin + i] = narrow<T>(x[i]);
  std::fill_n(out + row.begin + row.count, keys - row.begin - row.count, narrow<T>(0));
}

template <class W>
MEGALITE_INLINE void multiply(W* __restrict x, const W* __restrict y, W factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] *= y[i] * factor;
}

// Replaces scores by weights after dropout; returns the logarithm of the sum of exponentials.
template <class T>
MEGALITE_INLINE Wide<T> softmax_row(T* scores, const Row& row, const Problem& problem, Wide<T>* x, Wide<T>* factors) {
  using W = Wide<T>;
  load_row(x, scores + row.begin, row, problem.scale);
  const W largest = maximum(x, row.count);
  exponentiate(x, row.count, largest);
  std::fill_n(factors, row.count, W{1});
  const W sum = dot(x, factors, row.count);
  if (problem.drops) keep_factors(factors, row, problem.mask);
  multiply(x, factors, W{1} / sum, row.count);
  store_row(scores, x, row, problem.keys);
  return largest + std::log(sum);
}

// Recomputes weights after dropout from the scores, and replaces the weights' gradients by the scores' gradients.
template <class T>
MEGALITE_INLINE void backward_row(
    T* scores, T* grad, Wide<T> log_sum, const Row& row, const Problem& problem, Wide<T>* x, Wide<T>* factors,
    Wide<T>* g) {
  using W = Wide<T>;
  load_row(x, scores + row.begin, row, problem.scale);
  exponentiate(x, row.count, log_sum);
  std::fill_n(factors, row.count, W{1});
  if (problem.drops) keep_factors(factors, row, problem.mask);
  for (int64_t i = 0; i < row.count; ++i) g[i] = widen(grad[row.begin + i]) * factors[i];
  const W mean = dot(x, g, row.count);
  const auto scale = static_cast<W>(problem.scale);
  for (int64_t i = 0; i < row.count; ++i) g[i] = x[i] * (g[i] - mean) * scale;
  multiply(x, factors, W{1}, row.count);
  store_row(scores, x, row, problem.keys);
  store_row(grad, g, row, problem.keys);
}

using Tensor = torch::stable::Tensor;

Problem problem_of(
    const Tensor& scores, const std::optional<Tensor>& slopes, const std::optional<Tensor>& starts,
    const std::optional<Tensor>& ends, const std::optional<Tensor>& samples, double scale, double p, int64_t key, int64_t base, int64_t first,
    int64_t seq_length) {
  check_scores(scores, first, seq_length);
  STD_TORCH_CHECK(p == 0.0 || samples.has_value(), "causal_softmax: dropout needs sample numbers");
  const int64_t num_samples = scores.size(0), num_heads = scores.size(1);
  return {
      num_heads, scores.size(2), scores.size(3), scale,
      checked_elements<double>(scores, slopes, num_heads, "slopes"),
      checked_elements<int64_t>(scores, starts, num_samples * seq_length, "starts"),
      checked_elements<int64_t>(scores, ends, num_samples * seq_length, "ends"),
      checked_elements<int64_t>(scores, samples, num_samples, "samples"), p > 0.0, mask_of(p, key), base, first,
      seq_length};
}

// Calls `body(row number, its range, buffers)` for every query; each buffer has one element per key.
template <class W, class Body>
void for_each_row(const Problem& problem, int64_t num_rows, int num_buffers, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, problem.keys));
  torch::stable::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<W> buffers(num_buffers * problem.keys);
    run_for_isa([&]() MEGALITE_BODY {
      for (int64_t number = begin; number < end; ++number) body(number, row_at(problem, number), buffers.data());
    });
  });
}

}  // namespace

Tensor causal_softmax_(
    Tensor scores, const std::optional<Tensor>& slopes, const std::optional<Tensor>& starts,
    const std::optional<Tensor>& ends, const std::optional<Tensor>& samples, double scale, double p, int64_t key, int64_t base, int64_t first,
    int64_t seq_length) {
  const Problem problem =
      problem_of(scores, slopes, starts, ends, samples, scale, p, key, base, first, seq_length);
  auto log_sums = torch::stable::new_empty(
      scores, {scores.size(0), problem.num_heads, problem.rows}, computed_in(scores));
  dispatch_floating(scores, [&](auto element) {
    using T = decltype(element);
    T* values = static_cast<T*>(scores.mutable_data_ptr());
    auto* sums = static_cast<Wide<T>*>(log_sums.mutable_data_ptr());
    for_each_row<Wide<T>>(problem, log_sums.numel(), 2, [&](int64_t number, const Row& row, Wide<T>* x) MEGALITE_BODY {
      sums[number] = softmax_row(values + number * problem.keys, row, problem, x, x + problem.keys);
    });
  });
  return log_sums;
}

void causal_softmax_backward_(
    Tensor scores, Tensor grad, const Tensor& log_sums, const std::optional<Tensor>& slopes,
    const std::optional<Tensor>& starts, const std::optional<Tensor>& ends, const std::optional<Tensor>& samples,
    double scale, double p, int64_t key, int64_t base, int64_t first, int64_t seq_length) {
  const Problem problem =
      problem_of(scores, slopes, starts, ends, samples, scale, p, key, base, first, seq_length);
  check_weights_gradient(scores, grad, log_sums);
  dispatch_floating(scores, [&](auto element) {
    using T = decltype(element);
    T* values = static_cast<T*>(scores.mutable_data_ptr());
    T* gradients = static_cast<T*>(grad.mutable_data_ptr());
    const auto* sums = static_cast<const Wide<T>*>(log_sums.const_data_ptr());
    for_each_row<Wide<T>>(problem, log_sums.numel(), 3, [&](int64_t number, const Row& row, Wide<T>* x) MEGALITE_BODY {
      const int64_t keys = problem.keys, at = number * keys;
      backward_row(values + at, gradients + at, sums[number], row, problem, x, x + keys, x + 2 * keys);
    });
  });
}

}  // namespace megalite::cpu
