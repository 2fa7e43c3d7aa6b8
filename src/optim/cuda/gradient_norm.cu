// Sum of squares of all gradients: a float64 sum a chunk, then one of all chunks, each in a fixed order. 4 bytes an
// element, once.
#include "optim/cuda/pieces.h"

namespace tessera::optim::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) squares_kernel(const __grid_constant__ Pieces pieces, double* sums) {
  __shared__ double shared[kThreads / 32];
  const Chunk chunk = chunk_of(pieces, blockIdx.x);
  const Piece& p = pieces.piece[chunk.piece];
  double sum = 0;
  for_eights(chunk, [&](int64_t i, int64_t left) {
    float g[8];
    load8(p.gradient + chunk.begin + i, left, p.whole, g);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += double(g[j]) * double(g[j]);
  });
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

constexpr int kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads) rows_kernel(const double* from, int64_t count, double* to) {
  __shared__ double shared[kSumThreads / 32];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += from[blockIdx.x * count + i];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) to[blockIdx.x] = sum;
}

}  // namespace

void sum_rows(GpuStream stream, const double* from, int64_t rows, int64_t count, double* to) {
  launch(rows_kernel, rows, kSumThreads, 0, stream)(from, count, to);
}

void sum_of_squares(GpuStream stream, std::span<const Slot> slots, const View& sums, const View& total) {
  int64_t done = 0;
  for (size_t i = 0; i < slots.size(); i += kPieces) {
    Pieces pieces;
    for (const Slot& s : slots.subspan(i, std::min<size_t>(kPieces, slots.size() - i))) {
      if (s.gradient.elements() == 0) continue;
      const float* gradient = s.gradient.gpu<float>();
      pieces.add({.gradient = gradient, .elements = s.gradient.elements(), .whole = aligned(gradient)}, 1);
    }
    launch(squares_kernel, pieces.chunks, kThreads, 0, stream)(pieces, sums.gpu<double>() + done);
    done += pieces.chunks;
  }
  sum_rows(stream, sums.gpu<double>(), 1, done, total.gpu<double>());
}

}  // namespace tessera::optim::cuda
