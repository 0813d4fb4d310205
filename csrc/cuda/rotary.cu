// Rotary position embedding on a GPU; see megalite/kernels/rotary.py.
#include <algorithm>

#include "launch.cuh"
#include "vector.cuh"

namespace megalite::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadsInFlight = 4;  // heads that a thread reads before rotating the first; all use the same angles

// The dims of a block's threads: pairs of a head (x), groups of heads (y), tokens (z). A pair is (i, i + d/2).
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) rotate_kernel(
    const T* x, const Wide<T>* cosine, const Wide<T>* sine, T* out, const Heads shape, const Wide<T> sign) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (token >= shape.sequence * shape.batch) return;
  const int64_t place = token / shape.batch, sample = token - place * shape.batch, half = shape.d / 2;
  const int64_t table = (place * shape.table_batch + (shape.table_batch == 1 ? 0 : sample)) * shape.d;
  const T* from = x + place * shape.steps[0] + sample * shape.steps[1];
  T* to = out + token * shape.heads * shape.d;
  for (int64_t i = threadIdx.x * kWidth; i < half; i += blockDim.x * kWidth) {
    Wide<T> c[2][kWidth], s[2][kWidth];
    load_wide<kWidth>(c[0], cosine + table + i);
    load_wide<kWidth>(c[1], cosine + table + half + i);
    load_wide<kWidth>(s[0], sine + table + i);
    load_wide<kWidth>(s[1], sine + table + half + i);
    for (int64_t head = threadIdx.y; head < shape.heads; head += blockDim.y * kHeadsInFlight) {
      Vector<T, kWidth> first[kHeadsInFlight], second[kHeadsInFlight];
      MEGALITE_UNROLL
      for (int h = 0; h < kHeadsInFlight; ++h) {
        const int64_t at = head + h * blockDim.y;
        if (at >= shape.heads) break;
        first[h] = load<kWidth>(from + at * shape.steps[2] + i);
        second[h] = load<kWidth>(from + at * shape.steps[2] + half + i);
      }
      MEGALITE_UNROLL
      for (int h = 0; h < kHeadsInFlight; ++h) {
        const int64_t at = head + h * blockDim.y;
        if (at >= shape.heads) break;
        Wide<T> of_first[kWidth], of_second[kWidth];
        MEGALITE_UNROLL
        for (int k = 0; k < kWidth; ++k) {
          const Wide<T> a = first[h][k], b = second[h][k];
          of_first[k] = a * c[0][k] - b * (sign * s[0][k]);
          of_second[k] = b * c[1][k] + a * (sign * s[1][k]);
        }
        store(to + at * shape.d + i, narrow_all<T>(of_first));
        store(to + at * shape.d + half + i, narrow_all<T>(of_second));
      }
    }
  }
}

}  // namespace

void rotate(
    Dtype dtype, const void* x, const void* cosine, const void* sine, void* out, Heads shape, bool inverse,
    cudaStream_t stream) {
  const int64_t tokens = shape.sequence * shape.batch, half = shape.d / 2;
  if (tokens == 0 || shape.heads == 0 || half == 0) return;
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t steps = shape.steps[0] | shape.steps[1] | shape.steps[2];
    const bool fits = fits_vectors((steps | half) * sizeof(T), x, out) && fits_vectors(0, cosine, sine);
    dispatch_width<T>(fits, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto pairs = static_cast<unsigned>(std::min<int64_t>(half / kWidth, kThreads));
      const int64_t groups = (shape.heads + kHeadsInFlight - 1) / kHeadsInFlight;
      const auto group = static_cast<unsigned>(std::min<int64_t>(groups, kThreads / pairs));
      const unsigned depth = std::min(64u, kThreads / (pairs * group));  // CUDA's limit is 64
      const dim3 grid(static_cast<unsigned>((tokens + depth - 1) / depth)), block(pairs, group, depth);
      launch(
          rotate_kernel<T, kWidth>, grid, block, 0, stream, static_cast<const T*>(x),
          static_cast<const Wide<T>*>(cosine), static_cast<const Wide<T>*>(sine), static_cast<T*>(out), shape,
          inverse ? Wide<T>{-1} : Wide<T>{1});
    });
  });
}

}  // namespace megalite::cuda
