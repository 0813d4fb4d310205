// A tensor as rows and columns: loops over spans of it, and column sums that do not depend on the number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../checks.h"
#include "dtype.h"
#include "isa.h"

namespace megalite::cpu {

constexpr int64_t kGrain = 1 << 15;  // minimum number of elements per thread
constexpr int64_t kSpan = 512;       // elements of a row: their sums stay in the first-level cache

// A bias in the precision of the computation, or zeros without a bias, so that loops need no second version.
template <class T>
std::vector<Wide<T>> wide_bias(const std::optional<torch::stable::Tensor>& bias, int64_t columns) {
  std::vector<Wide<T>> wide(columns);
  if (bias) {
    const auto dense = torch::stable::contiguous(*bias);
    const T* source = static_cast<const T*>(dense.const_data_ptr());
    for (int64_t i = 0; i < columns; ++i) wide[i] = widen(source[i]);
  }
  return wide;
}

// Calls `row(r)` for each row, in parallel on several threads.
template <class Row>
void for_rows(int64_t rows, int64_t columns, const Row& row) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    run_for_isa([&]() MEGALITE_BODY {
      for (int64_t r = begin; r < end; ++r) row(r);
    });
  });
}

// Calls `span(row, first column, count, sums)` for all elements, `max_span` at a time. A span adds to any of `num_sums`
// sums, and `out` gets their totals over all rows.
//
// Rows are summed in tiles, and then the tiles are summed. Tiles do not depend on the threads, and chains are short.
template <class T, class Span>
void sum_rows(
    int64_t rows, int64_t columns, int64_t num_sums, T* out, const Span& span, int64_t max_span = kSpan) {
  constexpr int64_t kMaxTiles = 64, kMinTileRows = 16;
  const int64_t tile_rows = std::max(kMinTileRows, (rows + kMaxTiles - 1) / kMaxTiles);
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  std::vector<Wide<T>> partial(tiles * num_sums);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, tile_rows * columns));
  torch::stable::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    run_for_isa([&]() MEGALITE_BODY {
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t last = std::min(rows, (tile + 1) * tile_rows);
        Wide<T>* sums = partial.data() + tile * num_sums;
        for (int64_t column = 0; column < columns; column += max_span) {
          const int64_t count = std::min(max_span, columns - column);
          for (int64_t r = tile * tile_rows; r < last; ++r) span(r, column, count, sums);
        }
      }
    });
  });
  for (int64_t tile = 1; tile < tiles; ++tile) {
    for (int64_t i = 0; i < num_sums; ++i) partial[i] += partial[tile * num_sums + i];
  }
  for (int64_t i = 0; i < num_sums; ++i) out[i] = narrow<T>(tiles == 0 ? Wide<T>{0} : partial[i]);
}

}  // namespace megalite::cpu
