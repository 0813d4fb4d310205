// RMSNorm and LayerNorm of one row by one block, and their gradients; see megalite/kernels/norm.py.
//
// A row is a StreamedRow or a HeldRow of span.cuh. Both give each thread the same elements in the same order, so
// results have the same bits.
#pragma once

#include "elementary.cuh"
#include "span.cuh"

namespace megalite::cuda {

constexpr int kNormSlots = 4, kNormGradSlots = 2;  // vectors of a row that a thread reads before using the first
constexpr int64_t kPartRows = 8, kMaxParts = 1024;  // rows per part (2048 rows keep a GPU busy); most parts

// Number of sums over the rows: the gradients of weight and bias; RMSNorm only has the first.
template <bool kCentres>
constexpr int kNormSums = kCentres ? 2 : 1;

// Returns whether a block's registers can hold a row: whole vectors, at most kSlots per thread.
template <class T, int kSlots>
bool fits_block(int64_t columns) {
  return columns <= int64_t{kMaxSpanThreads} * kSlots * kVectorWidth<T>;
}

template <int kNum, class W>
using WarpValues = W[kMaxSpanWarps][kNum];

template <class W>
__device__ __forceinline__ W inverse_root(W sum_of_squares, int64_t columns, double epsilon) {
  return W{1} / sqrt(sum_of_squares / static_cast<W>(columns) + static_cast<W>(epsilon));
}

// The mean of a row; `x_of` returns the elements of a vector. RMSNorm uses 0.
template <bool kCentres, int kWidth, class W, class Row, class Elements>
__device__ __forceinline__ W mean_of(const Row& row, const Elements& x_of, int64_t columns) {
  if constexpr (!kCentres) return W{0};
  __shared__ WarpValues<1, W> shared;
  W sums[1] = {};
  row.each([&](const auto& loaded, int64_t, int) {
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) sums[0] += x_of(loaded)[i];
  });
  block_sums(sums, shared);
  return sums[0] / static_cast<W>(columns);
}

// Writes the norm of a row of vectors Vector<T, kWidth>.
template <bool kCentres, int kWidth, class T, class Row>
__device__ __forceinline__ void write_norm(
    const Row& row, const T* weight, const T* bias, T* result, int64_t columns, double epsilon) {
  using W = Wide<T>;
  __shared__ WarpValues<1, W> shared;
  const auto x_of = [](const auto& loaded) -> const auto& { return loaded; };
  const W mean = mean_of<kCentres, kWidth, W>(row, x_of, columns);
  W squares[1] = {};
  row.each([&](const auto& x, int64_t, int) {
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const W centred = x[i] - mean;
      squares[0] = multiply_add(centred, centred, squares[0]);
    }
  });
  block_sums(squares, shared);
  const W inverse = inverse_root(squares[0], columns, epsilon);
  row.each([&](const auto& x, int64_t vector, int) {
    W weights[kWidth], added[kWidth];
    load_wide<kWidth>(weights, weight + vector * kWidth);
    load_wide<kWidth>(added, kCentres ? bias + vector * kWidth : nullptr);
    W y[kWidth];
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) y[i] = multiply_add((x[i] - mean) * inverse, weights[i], added[i]);
    store(result + vector * kWidth, narrow_all<T>(y));
  });
}

// Backward's inputs for a row: the norm's input, the output's gradient, and a term of the input's gradient.
template <class T, int kWidth>
struct GradientTerms {
  Vector<T, kWidth> x, grad, residual;
};

template <class T>
struct GradientInputs {
  const T *x, *grad, *residual;  // residual is null if nothing is added

  template <int kWidth>
  __device__ __forceinline__ GradientTerms<T, kWidth> load_at(int64_t at) const {
    GradientTerms<T, kWidth> terms = {load<kWidth>(x + at), load<kWidth>(grad + at), {}};
    if (residual != nullptr) terms.residual = load<kWidth>(residual + at);
    return terms;
  }
};

template <class W>
struct Statistics {
  W mean, inverse;  // mean of the row, and 1 / its standard deviation
  W along, level;   // the gradient's component along the normalized row, and its mean: neither changes the output
};

template <bool kCentres, int kWidth, class T, class Row>
__device__ __forceinline__ Statistics<Wide<T>> statistics_of(
    const Row& row, const T* weight, int64_t columns, double epsilon) {
  using W = Wide<T>;
  constexpr int kSums = kCentres ? 3 : 2;
  __shared__ WarpValues<kSums, W> shared;
  const auto x_of = [](const auto& terms) -> const auto& { return terms.x; };
  const W mean = mean_of<kCentres, kWidth, W>(row, x_of, columns);
  W sums[kSums] = {};  // sums of the squares, of the gradient along the row, and of the gradient
  row.each([&](const auto& terms, int64_t vector, int) {
    const auto weights = load<kWidth>(weight + vector * kWidth);
    MEGALITE_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const W centred = terms.x[i] - mean, y = terms.grad[i] * weights[i];
      sums[0] = multiply_add(centred, centred, sums[0]);
      sums[1] = multiply_add(y, centred, sums[1]);
      if constexpr (kCentres) sums[kSums - 1] += y;
    }
  });
  block_sums(sums, shared);
  const W inverse = inverse_root(sums[0], columns, epsilon), count = static_cast<W>(columns);
  return {mean, inverse, sums[1] * inverse / count, kCentres ? sums[kSums - 1] / count : W{0}};
}

// A block's sums over its rows, kSums per column, in shared memory: each thread has the sums of its own vectors.
template <int kSums, int kWidth, class W>
struct SharedSums {
  W* first;
  int64_t columns;

  __device__ __forceinline__ SharedSums(W* first, int64_t columns) : first(first), columns(columns) {
    for (int64_t vector = threadIdx.x; vector < columns / kWidth; vector += blockDim.x) {
      MEGALITE_UNROLL
      for (int sum = 0; sum < kSums; ++sum) store(first + sum * columns + vector * kWidth, Vector<W, kWidth>{});
    }
  }

  // Calls add(sums) for the sums of a vector, W[kSums][kWidth].
  template <class Add>
  __device__ __forceinline__ void add(int64_t vector, int, const Add& add) {
    Vector<W, kWidth> sums[kSums];
    W* at = first + vector * kWidth;
    MEGALITE_UNROLL
    for (int sum = 0; sum < kSums; ++sum) sums[sum] = load<kWidth>(at + sum * columns);
    add(sums);
    MEGALITE_UNROLL
    for (int sum = 0; sum < kSums; ++sum) store(at + sum * columns, sums[sum]);
  }

  __device__ __forceinline__ void write(W* to) {
    for (int64_t vector = threadIdx.x; vector < columns / kWidth; vector += blockDim.x) {
      add(vector, 0, [=](const auto& sums) {
        MEGALITE_UNROLL
        for (int sum = 0; sum < kSums; ++sum) store(to + sum * columns + vector * kWidth, sums[sum]);
      });
    }
  }
};

// The same in registers, for kSlots vectors per thread.
template <int kSums, int kWidth, int kSlots, class W>
struct HeldSums {
  int64_t columns;
  Vector<W, kWidth> slots[kSlots][kSums] = {};

  template <class Add>
  __device__ __forceinline__ void add(int64_t, int slot, const Add& add) {
    add(slots[slot]);
  }

  __device__ __forceinline__ void write(W* to) const {
    MEGALITE_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      const int vector = vector_of(slot);
      if (vector >= columns / kWidth) continue;
      MEGALITE_UNROLL
      for (int sum = 0; sum < kSums; ++sum) store(to + sum * columns + vector * kWidth, slots[slot][sum]);
    }
  }
};

// Loops over the block's rows (every gridDim.x-th row), sums the parameters' gradients, and writes the sums to
// parts[block]. row_of(r) is a row of GradientTerms. finish(r, vector, of_x, sums) writes the gradient of a vector of
// the input, and may add to further sums after the norm's own parameters.
template <bool kCentres, int kWidth, class T, class RowOf, class Sums, class Finish>
__device__ __forceinline__ void norm_gradients(
    const RowOf& row_of, Sums sums, const Finish& finish, const T* weight, Wide<T>* part, int64_t rows,
    int64_t columns, double epsilon) {
  using W = Wide<T>;
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const auto row = row_of(r);
    const Statistics<W> of_row = statistics_of<kCentres, kWidth>(row, weight, columns, epsilon);
    row.each([&](const auto& terms, int64_t vector, int slot) {
      const auto weights = load<kWidth>(weight + vector * kWidth);
      W of_x[kWidth];
      sums.add(vector, slot, [&](auto& sum) {
        MEGALITE_UNROLL
        for (int i = 0; i < kWidth; ++i) {
          const W normal = (terms.x[i] - of_row.mean) * of_row.inverse, y = terms.grad[i];
          const W inner = multiply_add(-normal, of_row.along, multiply_add(y, weights[i], -of_row.level));
          of_x[i] = multiply_add(of_row.inverse, inner, terms.residual[i]);
          sum[0].words[i] = multiply_add(y, normal, sum[0].words[i]);
          if constexpr (kCentres) sum[1].words[i] += y;
        }
        finish(r, vector, of_x, sum);
      });
    });
  }
  sums.write(part);
}

// Calls `function` with a value of the element type and two constants: the width of accesses, and whether it centres.
template <class Function, class... Pointers>
void dispatch_norm(Dtype dtype, Norm kind, int64_t columns, const Function& function, const Pointers*... pointers) {
  dispatch(dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_width<T>(fits_vectors(columns * sizeof(T), pointers...), [&](auto width) {
      if (kind.centres) return function(element, width, std::true_type{});
      return function(element, width, std::false_type{});
    });
  });
}

}  // namespace megalite::cuda
