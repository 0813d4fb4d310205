// Counter-based normal numbers on a GPU; see megalite/kernels/philox.py.
#include <algorithm>

#include "random.cuh"
#include "rows.cuh"

namespace megalite::cuda {
namespace {

// Rows are runs of elements that are neighbours in the full tensor; the last one may end early.
template <class T, int kWidth>
struct Fill {
  struct Loaded {};
  struct State {};

  T* out;
  int64_t num, columns, base, run_stride;
  Rounds rounds;
  double std, mean;

  __device__ State begin(int64_t) const { return {}; }
  __device__ Loaded load(int64_t, int64_t) const { return {}; }

  __device__ void apply(State&, const Loaded&, int64_t row, int64_t vector) const {
    const int64_t column = vector * kWidth, at = row * columns + column;
    if (at >= num) return;
    uint32_t words[kWidth];
    words_at(words, static_cast<uint64_t>(base + row * run_stride + column), 0, rounds);
    Wide<T> result[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      result[i] = static_cast<Wide<T>>(standard_normal(words[i]) * std + mean);
    }
    store(out + at, narrow_all<T>(result));
  }
};

}  // namespace

void fill_normal(
    Dtype dtype, void* out, int64_t num, double std, double mean, uint64_t key, int64_t base, int64_t run_length,
    int64_t run_stride, cudaStream_t stream) {
  if (num == 0) return;
  const int64_t columns = std::min(run_length, num), rows = (num + columns - 1) / columns;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const bool fits = fits_vectors(columns * sizeof(T), out) && num % kVectorWidth<T> == 0;
    dispatch_width<T>(fits, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Fill<T, kWidth> op{
          static_cast<T*>(out), num, columns, base, run_stride, Rounds::of(key), std, mean};
      for_rows(op, rows, columns / kWidth, stream);
    });
  });
}

}  // namespace megalite::cuda
