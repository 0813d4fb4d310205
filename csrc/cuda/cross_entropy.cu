// Cross-entropy over a part of the vocabulary on a GPU; see megalite/kernels/cross_entropy.py.
#include "exponentials.cuh"
#include "span.cuh"

namespace megalite::cuda {
namespace {

// Number of vectors that a thread reads before it uses the first: fewer if each takes more registers.
constexpr int kInFlight = 4, kInFlightBackward = 2;

template <class T>
__global__ void __launch_bounds__(kMaxSpanThreads) statistics_kernel(
    const T* logits, const int64_t* targets, Wide<T>* out, int64_t rows, Vocabulary vocabulary) {
  using W = Wide<T>;
  __shared__ W shared[kMaxSpanThreads / kWarp];
  const int64_t r = blockIdx.x;
  const T* row = logits + r * vocabulary.columns;
  Exponentials<T> mine;
  const auto add = [&](const auto& loaded, int64_t, auto width) {
    W numbers[decltype(width)::value];
    MEGALITE_UNROLL
    for (int i = 0; i < decltype(width)::value; ++i) numbers[i] = loaded[i];
    mine.add(numbers);
  };
  with_loads(
      [&](const auto& load) {
        sum_span<kInFlight, T>(
            vocabulary.num_real, [=](int64_t at, auto width) { return load(row + at, width); }, add);
      },
      row);
  const Exponentials<T> all = block_combine(mine, shared);
  if (threadIdx.x != 0) return;
  const int64_t column = targets[r] - vocabulary.start;
  out[r] = all.largest;
  out[rows + r] = all.sum;
  out[2 * rows + r] = 0 <= column && column < vocabulary.num_real ? widen(row[column]) : W{0};
}

template <class T>
__global__ void __launch_bounds__(kMaxSpanThreads) gradient_kernel(
    T* logits, const int64_t* targets, const Wide<T>* statistics, const Wide<T>* grad, int64_t rows,
    Vocabulary vocabulary) {
  using W = Wide<T>;
  const int64_t r = blockIdx.x, column = targets[r] - vocabulary.start;
  T* row = logits + r * vocabulary.columns;
  const W largest = statistics[r], upper = grad[r], scale = upper / statistics[rows + r];
  for_span<kInFlightBackward>(
      vocabulary.num_real, [=](int64_t at, auto width) { return load<decltype(width)::value>(row + at); },
      [=](const auto& loaded, int64_t at, auto width) {
        constexpr int kWidth = decltype(width)::value;
        W shares[kWidth];
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) shares[i] = exp_for<T>(loaded[i] - largest) * scale;
        const auto target = static_cast<uint64_t>(column - at);
        if (target < kWidth) {  // true for at most one vector of the row
          MEGALITE_UNROLL
          for (int i = 0; i < kWidth; ++i) shares[i] -= i == static_cast<int>(target) ? upper : W{0};
        }
        store(row + at, narrow_all<T>(shares));
      },
      row);
  zero_span(row + vocabulary.num_real, vocabulary.columns - vocabulary.num_real);
}

}  // namespace

void cross_entropy_statistics(
    Dtype dtype, const void* logits, const int64_t* targets, void* out, int64_t rows, Vocabulary vocabulary,
    cudaStream_t stream) {
  if (rows == 0) return;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    launch(
        statistics_kernel<T>, block_each(rows), span_threads<T, kInFlight>(vocabulary.num_real), 0,
        stream, static_cast<const T*>(logits), targets, static_cast<Wide<T>*>(out), rows, vocabulary);
  });
}

void cross_entropy_gradient(
    Dtype dtype, void* logits, const int64_t* targets, const void* statistics, const void* grad, int64_t rows,
    Vocabulary vocabulary, cudaStream_t stream) {
  if (rows == 0) return;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    launch(
        gradient_kernel<T>, block_each(rows), span_threads<T, kInFlightBackward>(vocabulary.columns),
        0, stream, static_cast<T*>(logits), targets, static_cast<const Wide<T>*>(statistics),
        static_cast<const Wide<T>*>(grad), rows, vocabulary);
  });
}

}  // namespace megalite::cuda
