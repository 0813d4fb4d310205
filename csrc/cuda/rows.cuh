// Loops over a tensor of rows and columns, and column sums that do not depend on the number of processors.
//
// A thread processes one vector of neighbouring columns: it reads their bias once and holds their sums in registers. It
// walks down the rows, and reads several rows before it computes the first.
//
// The operation is an object, passed to the kernel by value:
//   Loaded, State       data read from a row; data that a thread keeps from row to row
//   begin(vector)       returns the initial State
//   load(row, vector)   reads a vector of a row
//   apply(state, loaded, row, vector)   computes and writes a vector of a row
// With sums, it also has kSums, the number of sums per column, and State has sums[kSums][kWidth].
#pragma once

#include <algorithm>

#include "launch.cuh"
#include "vector.cuh"

namespace megalite::cuda {

constexpr int kThreads = 256;
constexpr int kRowBlocks = 3, kSumBlocks = 2;  // per multiprocessor: leaves enough registers that loads stay before
                                               // the first use, without spills
constexpr int kLanes = 32;              // largest number of threads side by side in a row
constexpr int kMinRows = 4;             // minimum number of rows per thread, if the tensor has as many
constexpr int64_t kManyBlocks = 4096;   // several per multiprocessor, so that the last blocks to end cost little

struct RowGrid {
  dim3 grid, block;
};

// Only depends on the tensor's shape and alignment, and so do the sums' bits.
inline RowGrid row_grid(int64_t rows, int64_t vectors) {
  unsigned lanes = 1;
  while (lanes < vectors && lanes < kLanes) lanes *= 2;
  const unsigned depth = kThreads / lanes;
  const int64_t across = (vectors + lanes - 1) / lanes;
  const int64_t needed = (rows + depth * kMinRows - 1) / (depth * kMinRows);
  const int64_t down = std::clamp<int64_t>(needed, 1, std::max<int64_t>(1, kManyBlocks / across));
  return {dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), dim3(lanes, depth)};
}

// Number of rows that a thread reads before using the first: more rows would need so many registers that fewer threads
// could run.
template <class Op>
constexpr int kRowsInFlight = sizeof(typename Op::Loaded) <= kVectorBytes ? 4 : 2;

template <class Op>
__device__ __forceinline__ void walk_rows(
    const Op& op, typename Op::State& state, int64_t vector, int64_t rows) {
  constexpr int kCount = kRowsInFlight<Op>;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; row + (kCount - 1) * step < rows; row += kCount * step) {
    typename Op::Loaded loaded[kCount];
    MEGALITE_UNROLL
    for (int i = 0; i < kCount; ++i) loaded[i] = op.load(row + i * step, vector);
    MEGALITE_UNROLL
    for (int i = 0; i < kCount; ++i) op.apply(state, loaded[i], row + i * step, vector);
  }
  for (; row < rows; row += step) op.apply(state, op.load(row, vector), row, vector);
}

template <class Op>
__global__ void __launch_bounds__(kThreads, kRowBlocks) row_kernel(const Op op, int64_t rows, int64_t vectors) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (vector >= vectors) return;
  auto state = op.begin(vector);
  walk_rows(op, state, vector, rows);
}

// Like row_kernel; then each block adds its threads' sums and writes them to parts[its depth][sum][column].
template <int kWidth, class W, class Op>
__global__ void __launch_bounds__(kThreads, kSumBlocks) sum_kernel(
    const Op op, W* parts, int64_t rows, int64_t vectors) {
  constexpr int kSlots = Op::kSums * kWidth;
  __shared__ W shared[kSlots * kThreads];
  const int lanes = blockDim.x, thread = threadIdx.y * lanes + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * lanes, vector = first + threadIdx.x;
  typename Op::State state = op.begin(vector < vectors ? vector : 0);
  if (vector < vectors) walk_rows(op, state, vector, rows);
  MEGALITE_UNROLL
  for (int slot = 0; slot < kSlots; ++slot) {
    shared[slot * kThreads + thread] = state.sums[slot / kWidth][slot % kWidth];
  }
  __syncthreads();
  for (int at = thread; at < kSlots * lanes; at += kThreads) {  // neighbouring threads write neighbouring columns
    const int i = at % kWidth, lane = at / kWidth % lanes, sum = at / (kWidth * lanes);
    if (first + lane >= vectors) continue;
    const W* column = shared + (sum * kWidth + i) * kThreads + lane;
    W total = column[0];
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) total += column[y * lanes];
    const int64_t line = static_cast<int64_t>(blockIdx.y) * Op::kSums + sum;
    parts[(line * vectors + first + lane) * kWidth + i] = total;
  }
}

constexpr int kPartDepth = 32, kPartsInFlight = 8;  // few blocks run, so each has many threads with several reads
constexpr int kPartThreads = kLanes * kPartDepth;

// out[i] = the sum of parts[0][i], parts[1][i] and so on.
template <class T>
__global__ void __launch_bounds__(kPartThreads) add_parts_kernel(
    const Wide<T>* parts, T* out, int64_t num_parts, int64_t num_sums) {
  __shared__ Wide<T> shared[kPartThreads];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  Wide<T> total{0};
  if (i < num_sums) {
    for (int64_t part = threadIdx.y; part < num_parts; part += kPartDepth * kPartsInFlight) {
      Wide<T> loaded[kPartsInFlight];
      MEGALITE_UNROLL
      for (int k = 0; k < kPartsInFlight; ++k) {
        const int64_t at = part + k * kPartDepth;
        loaded[k] = at < num_parts ? parts[at * num_sums + i] : Wide<T>{0};
      }
      MEGALITE_UNROLL
      for (int k = 0; k < kPartsInFlight; ++k) total += loaded[k];
    }
  }
  shared[threadIdx.y * kLanes + threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || i >= num_sums) return;
  for (int y = 1; y < kPartDepth; ++y) total += shared[y * kLanes + threadIdx.x];
  out[i] = narrow<T>(total);
}

// Applies `op` to each vector of each row.
template <class Op>
void for_rows(const Op& op, int64_t rows, int64_t vectors, cudaStream_t stream) {
  if (rows == 0 || vectors == 0) return;
  const RowGrid shape = row_grid(rows, vectors);
  launch(row_kernel<Op>, shape.grid, shape.block, 0, stream, op, rows, vectors);
}

// Sums `num_parts` parts of `num_sums` sums.
template <class T>
void add_parts(const void* parts, void* out, int64_t num_parts, int64_t num_sums, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((num_sums + kLanes - 1) / kLanes)), block(kLanes, kPartDepth);
  launch(
      add_parts_kernel<T>, grid, block, 0, stream, static_cast<const Wide<T>*>(parts), static_cast<T*>(out), num_parts,
      num_sums);
}

// Applies `op` to each vector of each row; `out` [kSums, columns] gets its sums over the rows.
template <class T, int kWidth, class Op>
void sum_rows(const Op& op, int64_t rows, int64_t columns, void* workspace, void* out, cudaStream_t stream) {
  if (columns == 0) return;
  const int64_t vectors = columns / kWidth;
  const RowGrid shape = row_grid(rows, vectors);
  auto* parts = static_cast<Wide<T>*>(workspace);
  launch(sum_kernel<kWidth, Wide<T>, Op>, shape.grid, shape.block, 0, stream, op, parts, rows, vectors);
  add_parts<T>(parts, out, shape.grid.y, Op::kSums * columns, stream);
}

}  // namespace megalite::cuda
