// The memory that column sums need.
#include "rows.cuh"

namespace megalite::cuda {

int64_t max_sum_parts(Dtype dtype, int64_t rows, int64_t columns) {
  int64_t parts = 0;
  dispatch(dtype, [&](auto element) {
    for (const int width : {1, kVectorWidth<decltype(element)>}) {
      parts = std::max<int64_t>(parts, row_grid(rows, std::max<int64_t>(1, columns / width)).grid.y);
    }
  });
  return parts;
}

}  // namespace megalite::cuda
