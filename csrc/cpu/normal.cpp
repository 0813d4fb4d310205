// Counter-based normal numbers on the CPU; see megalite/kernels/philox.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../checks.h"
#include "../ops.h"
#include "dtype.h"
#include "isa.h"

namespace megalite::cpu {
namespace {

constexpr int kPieceWords = 512;     // random words generated at a time: fits into the first-level cache
constexpr int64_t kGrain = 1 << 13;  // minimum number of elements per thread

// Fills `count` consecutive elements of the full tensor, starting at `index`.
template <class T>
MEGALITE_INLINE void fill_span(
    T* __restrict out, int64_t count, uint64_t index, uint64_t key, double std, double mean) {
  alignas(64) uint32_t words[kPieceWords];
  while (count > 0) {
    const int skip = static_cast<int>(index % kWordsPerBlock);
    const int num = static_cast<int>(std::min<int64_t>(count, kPieceWords - skip));
    random_words(words, index / kWordsPerBlock, (skip + num + kWordsPerBlock - 1) / kWordsPerBlock, 0, key);
    for (int i = 0; i < num; ++i) {
      out[i] = narrow<T>(static_cast<Wide<T>>(standard_normal(words[skip + i]) * std + mean));
    }
    out += num, index += num, count -= num;
  }
}

}  // namespace

void fill_normal_(
    torch::stable::Tensor out, double std, double mean, int64_t key, int64_t base, int64_t run_length,
    int64_t run_stride) {
  check_fill(out, run_length);
  dispatch_floating(out, [&](auto element) {
    using T = decltype(element);
    T* target = static_cast<T*>(out.mutable_data_ptr());
    torch::stable::parallel_for(0, out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      run_for_isa([&]() MEGALITE_BODY {
        for (int64_t at = begin; at < end;) {
          const int64_t run = at / run_length, offset = at % run_length;
          const int64_t count = std::min(run_length - offset, end - at);
          fill_span(target + at, count, base + run * run_stride + offset, key, std, mean);
          at += count;
        }
      });
    });
  });
}

}  // namespace megalite::cpu
