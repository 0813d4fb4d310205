// Counter-based dropout on a GPU; see megalite/kernels/dropout.py.
#include "random.cuh"
#include "rows.cuh"

namespace megalite::cuda {
namespace {

template <class T, int kWidth>
struct Drop {
  using Loaded = Vector<T, kWidth>;
  struct State {};

  const T* x;
  T* out;
  int64_t columns;
  Places places;
  Mask mask;
  Rounds rounds;

  __device__ State begin(int64_t) const { return {}; }

  __device__ Loaded load(int64_t row, int64_t vector) const {
    return cuda::load<kWidth>(x + row * columns + vector * kWidth);
  }

  __device__ void apply(State&, const Loaded& loaded, int64_t row, int64_t vector) const {
    const Position position = position_of(places, row);
    const auto scale = static_cast<Wide<T>>(mask.scale);
    uint32_t words[kWidth];
    words_at(words, position.index + vector * kWidth, position.sample, rounds);
    Wide<T> result[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const Wide<T> kept = loaded[i] * scale;
      result[i] = words[i] >= mask.threshold ? kept : Wide<T>{0};
    }
    store(out + row * columns + vector * kWidth, narrow_all<T>(result));
  }
};

}  // namespace

void dropout(
    Dtype dtype, const void* x, void* out, int64_t rows, int64_t columns, Site site, Mask mask, cudaStream_t stream) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), x, out), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Drop<T, kWidth> op{
          static_cast<const T*>(x), static_cast<T*>(out), columns, Places::of(site, rows), mask, Rounds::of(mask.key)};
      for_rows(op, rows, columns / kWidth, stream);
    });
  });
}

}  // namespace megalite::cuda
