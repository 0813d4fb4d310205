// Causal softmax of attention scores on a GPU; see megalite/kernels/softmax.py.
#include "exponentials.cuh"
#include "random.cuh"
#include "span.cuh"

namespace megalite::cuda {
namespace {

constexpr int kInFlight = 1;  // more would need too many registers, because each element has a random word

// The keys of one query: `count` keys from `begin` on; key number `own` is at the query's own position.
template <class T>
struct Row {
  using W = Wide<T>;

  int64_t begin, count, own;
  W scale, slope;
  uint64_t sample, index;  // for dropout: the sample, and the index of the first key's weight in it

  __device__ static Row at(const Scores& scores, int64_t number) {
    const int64_t query = scores.first + number % scores.rows, head = number / scores.rows % scores.num_heads;
    const int64_t sample = number / (scores.rows * scores.num_heads);
    int64_t begin = scores.starts == nullptr ? 0 : scores.starts[sample * scores.seq_length + query];
    begin = begin < 0 ? 0 : (begin > query ? query : begin);  // never read outside of the row, whatever `starts` is
    int64_t end = scores.ends == nullptr ? query + 1 : scores.ends[sample * scores.seq_length + query];
    end = end < query + 1 ? query + 1 : (end > scores.keys ? scores.keys : end);
    const int64_t before = scores.base + (head * scores.seq_length + query) * scores.seq_length;
    Row row = {
        begin, end - begin, query - begin, static_cast<W>(scores.scale), 0, 0, static_cast<uint64_t>(before + begin)};
    if (scores.slopes != nullptr) row.slope = static_cast<W>(scores.slopes[head]);
    if (scores.samples != nullptr) row.sample = static_cast<uint64_t>(scores.samples[sample]);
    return row;
  }

  // The scaled and biased score of a key.
  __device__ W biased(W score, int64_t key) const {
    return score * scale + slope * static_cast<W>(static_cast<int>(key - own));
  }
};

// The dropout factors of the weights from `key` on: 0 or 1 / (1 - p), and 1 without dropout.
template <bool kDrops, class T, int kWidth>
__device__ __forceinline__ void keep_factors(
    Wide<T> (&factors)[kWidth], const Row<T>& row, int64_t key, const Mask& mask, const Rounds& rounds) {
  uint32_t words[kWidth] = {};
  if constexpr (kDrops) words_at(words, row.index + key, row.sample, rounds);
  const auto kept = kDrops ? static_cast<Wide<T>>(mask.scale) : Wide<T>{1};
  MEGALITE_UNROLL
  for (int i = 0; i < kWidth; ++i) factors[i] = !kDrops || words[i] >= mask.threshold ? kept : Wide<T>{0};
}

template <class T>
__device__ __forceinline__ void zero_hidden(T* keys, const Row<T>& row, int64_t num_keys) {
  zero_span(keys, row.begin);
  zero_span(keys + row.begin + row.count, num_keys - row.begin - row.count);
}

template <bool kDrops, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) softmax_kernel(
    T* all_scores, Wide<T>* log_sums, const Scores problem, const Mask mask, const Rounds rounds) {
  using W = Wide<T>;
  __shared__ W shared[kMaxSpanThreads / kWarp];
  const int64_t number = blockIdx.x;
  const auto row = Row<T>::at(problem, number);
  T* keys = all_scores + number * problem.keys;
  T* seen = keys + row.begin;
  Exponentials<T> mine;
  const auto add = [&](const auto& loaded, int64_t at, auto width) {
    W numbers[decltype(width)::value];
    MEGALITE_UNROLL
    for (int i = 0; i < decltype(width)::value; ++i) numbers[i] = row.biased(loaded[i], at + i);
    mine.add(numbers);
  };
  with_loads(
      [&](const auto& load) {
        sum_span<kInFlight, T>(row.count, [=](int64_t at, auto width) { return load(seen + at, width); }, add);
      },
      seen);
  const Exponentials<T> all = block_combine(mine, shared);
  const W largest = all.largest, inverse = W{1} / all.sum;
  for_span<kInFlight>(
      row.count, [=](int64_t at, auto width) { return load<decltype(width)::value>(seen + at); },
      [=](const auto& loaded, int64_t at, auto width) {
        constexpr int kWidth = decltype(width)::value;
        W factors[kWidth];
        keep_factors<kDrops>(factors, row, at, mask, rounds);
        W weights[kWidth];
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const W power = exp_for<T>(row.biased(loaded[i], at + i) - largest);
          weights[i] = power * (factors[i] * inverse);
        }
        store(seen + at, narrow_all<T>(weights));
      },
      seen);
  zero_hidden(keys, row, problem.keys);
  if (threadIdx.x == 0) log_sums[number] = largest + log(all.sum);
}

template <class T, int kWidth>
struct Pair {
  Vector<T, kWidth> score, grad;
};

// The second pass recomputes the weights and their mask: keeping them would need registers in proportion to the row.
template <bool kDrops, class T>
__global__ void __launch_bounds__(kMaxSpanThreads) backward_kernel(
    T* all_scores, T* all_grads, const Wide<T>* log_sums, const Scores problem, const Mask mask, const Rounds rounds) {
  using W = Wide<T>;
  __shared__ W shared[kMaxSpanThreads / kWarp];
  const int64_t number = blockIdx.x;
  const auto row = Row<T>::at(problem, number);
  T *keys = all_scores + number * problem.keys, *grads = all_grads + number * problem.keys;
  T *seen = keys + row.begin, *upper = grads + row.begin;
  const W log_sum = log_sums[number];
  W mean = 0;
  const auto add = [&](const auto& pair, int64_t at, auto width) {
    constexpr int kWidth = decltype(width)::value;
    W factors[kWidth];
    keep_factors<kDrops>(factors, row, at, mask, rounds);
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const W weight = exp_for<T>(row.biased(pair.score[i], at + i) - log_sum);
      mean += weight * (pair.grad[i] * factors[i]);
    }
  };
  with_loads(
      [&](const auto& load) {
        const auto load_pair = [=](int64_t at, auto width) {
          return Pair<T, decltype(width)::value>{load(seen + at, width), load(upper + at, width)};
        };
        sum_span<kInFlight, T>(row.count, load_pair, add);
      },
      seen, upper);
  mean = block_reduce(mean, shared, Add{});
  for_span<kInFlight>(
      row.count,
      [=](int64_t at, auto width) {
        constexpr int kWidth = decltype(width)::value;
        return Pair<T, kWidth>{load<kWidth>(seen + at), load<kWidth>(upper + at)};
      },
      [=](const auto& pair, int64_t at, auto width) {
        constexpr int kWidth = decltype(width)::value;
        W factors[kWidth];
        keep_factors<kDrops>(factors, row, at, mask, rounds);
        W scores[kWidth], inner_grads[kWidth];
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const W weight = exp_for<T>(row.biased(pair.score[i], at + i) - log_sum);
          const W inner = pair.grad[i] * factors[i] - mean;
          scores[i] = weight * factors[i];
          inner_grads[i] = weight * inner * row.scale;
        }
        store(seen + at, narrow_all<T>(scores));
        store(upper + at, narrow_all<T>(inner_grads));
      },
      seen, upper);
  zero_hidden(keys, row, problem.keys);
  zero_hidden(grads, row, problem.keys);
}

}  // namespace

void causal_softmax(
    Dtype dtype, void* scores, void* log_sums, int64_t num, Scores problem, Mask mask, cudaStream_t stream) {
  if (num == 0) return;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    launch(
        mask.threshold == 0 ? softmax_kernel<false, T> : softmax_kernel<true, T>, block_each(num),
        span_threads<T, kInFlight>(problem.seq_length), 0, stream,
        static_cast<T*>(scores), static_cast<Wide<T>*>(log_sums), problem, mask, Rounds::of(mask.key));
  });
}

void causal_softmax_backward(
    Dtype dtype, void* scores, void* grad, const void* log_sums, int64_t num, Scores problem, Mask mask,
    cudaStream_t stream) {
  if (num == 0) return;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    launch(
        mask.threshold == 0 ? backward_kernel<false, T> : backward_kernel<true, T>, block_each(num),
        span_threads<T, kInFlight>(problem.seq_length), 0, stream,
        static_cast<T*>(scores), static_cast<T*>(grad), static_cast<const Wide<T>*>(log_sums), problem, mask,
        Rounds::of(mask.key));
  });
}

}  // namespace megalite::cuda
