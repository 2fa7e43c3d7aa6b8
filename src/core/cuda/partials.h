// Sums of the columns of partial sums (count, width), which the blocks of a kernel left: always in the same order.
//
// A block has kPartialColumns columns; a slice of the rows is added in order by one line of threads, then the slices.
#pragma once

#include "core/cuda/kernel.h"

namespace tessera::cuda {

constexpr int kPartialColumns = 32, kPartialSlices = 8, kPartialThreads = kPartialColumns * kPartialSlices;

inline int64_t partial_blocks(int64_t width) { return ceil_div(width, kPartialColumns); }

// The column that this thread writes: past any width where it has none.
__device__ inline int64_t partial_column() {
  if (threadIdx.x >= kPartialColumns) return INT64_MAX;
  return int64_t(blockIdx.x) * kPartialColumns + threadIdx.x;
}

// Called by all threads of a block; the sum is that of partial_column().
__device__ inline float sum_partials(const float* partials, int64_t count, int64_t width) {
  __shared__ float of_slices[kPartialSlices][kPartialColumns];
  const int column = threadIdx.x % kPartialColumns, slice = threadIdx.x / kPartialColumns;
  const int64_t c = int64_t(blockIdx.x) * kPartialColumns + column;
  float sum = 0;
  if (c < width) {
    const int64_t end = count * (slice + 1) / kPartialSlices;
#pragma unroll 8
    for (int64_t p = count * slice / kPartialSlices; p < end; ++p) sum += partials[p * width + c];
  }
  of_slices[slice][column] = sum;
  __syncthreads();
  float total = 0;
  for (int s = 0; s < kPartialSlices; ++s) total += of_slices[s][column];
  return total;
}

}  // namespace tessera::cuda
