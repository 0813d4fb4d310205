// Rotary position embedding on the CPU; see megalite/kernels/rotary.py.
#include "contract.h"

#include "../checks.h"
#include "../ops.h"
#include "rows.h"

namespace megalite::cpu {

using torch::stable::Tensor;

Tensor rotate(const Tensor& x, const Tensor& cosine, const Tensor& sine, bool inverse) {
  check_tables(x, cosine, sine);
  const int64_t sequence = x.size(0), batch = x.size(1), heads = x.size(2), d = x.size(3);
  const auto input = x.stride(3) == 1 ? x : torch::stable::contiguous(x);  // a slice of heads is read in place
  const auto cosines = torch::stable::contiguous(cosine), sines = torch::stable::contiguous(sine);
  auto out = torch::stable::new_empty(x, {sequence, batch, heads, d});
  const int64_t steps[] = {input.stride(0), input.stride(1), input.stride(2)};
  const int64_t table_batch = cosine.size(1);
  dispatch_floating(input, [&](auto element) {
    using T = decltype(element);
    const T* source = static_cast<const T*>(input.const_data_ptr());
    const auto* cos_table = static_cast<const Wide<T>*>(cosines.const_data_ptr());
    const auto* sin_table = static_cast<const Wide<T>*>(sines.const_data_ptr());
    T* target = static_cast<T*>(out.mutable_data_ptr());
    const Wide<T> sign = inverse ? Wide<T>{-1} : Wide<T>{1};
    for_rows(sequence * batch, heads * d, [=](int64_t row) MEGALITE_BODY {
      const int64_t place = row / batch, sample = row % batch, half = d / 2;
      const int64_t at = (place * table_batch + (table_batch == 1 ? 0 : sample)) * d;
      const auto* __restrict c = cos_table + at;
      const auto* __restrict s = sin_table + at;
      for (int64_t head = 0; head < heads; ++head) {
        const T* __restrict from = source + place * steps[0] + sample * steps[1] + head * steps[2];
        T* __restrict to = target + (row * heads + head) * d;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const Wide<T> first = widen(from[i]), second = widen(from[half + i]);
          to[i] = narrow<T>(first * c[i] - second * (sign * s[i]));
          to[half + i] = narrow<T>(second * c[half + i] + first * (sign * s[half + i]));
        }
      }
    });
  });
  return out;
}

}  // namespace megalite::cpu
