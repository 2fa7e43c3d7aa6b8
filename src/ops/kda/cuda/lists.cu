// The lists of chunks and of pieces, from the document offsets on the GPU.
//
// A block fills the entries [256 b, 256 b + 256) of both lists. It adds up the counts of all documents before, 256 at a
// time, so that no block waits for another; with a few thousand documents that is a few steps. Both sums ride in one
// 64-bit word: chunks in the lower half, pieces in the upper.
#include "core/cuda/kernel.h"
#include "ops/kda/cuda.h"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Lists {
  const int64_t* offsets;
  int64_t documents, segment;
  Chunk* chunks;
  Piece* pieces;
};

__device__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ int64_t chunks_of(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }
__device__ int64_t pieces_of(int64_t chunks, int64_t segment) {
  return segment > 0 && chunks > 2 * segment ? (chunks + segment - 1) / segment : 1;
}

// Sum of `x` over the threads before this one; `total` of all.
__device__ uint64_t sum_before(uint64_t x, uint64_t* shared, uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t before = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // the last use of `shared` is over
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  sum -= x;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) sum += shared[w];
    total += shared[w];
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) fill_kernel(Lists l) {
  __shared__ uint64_t shared[kWarps];
  const int64_t begin = int64_t(blockIdx.x) * kThreads, end = begin + kThreads;
  uint64_t before = 0;  // of the documents that the steps so far have passed
  for (int64_t first = 0; first < l.documents; first += kThreads) {
    const int64_t n = first + threadIdx.x;
    const bool real = n < l.documents;
    const int64_t token = real ? l.offsets[n] : 0, length = real ? l.offsets[n + 1] - token : 0;
    const int64_t chunks = chunks_of(length), pieces = real ? pieces_of(chunks, l.segment) : 0;
    uint64_t total;
    const uint64_t at = before + sum_before(uint64_t(chunks) | uint64_t(pieces) << 32, shared, total);
    const int64_t chunk = int64_t(at & 0xffffffffu), piece = int64_t(at >> 32);
    for (int64_t i = chunk > begin ? chunk : begin; i < least(chunk + chunks, end); ++i) {
      const int64_t done = (i - chunk) * kChunk;
      l.chunks[i] = {token + done, int32_t(n), int32_t(least(kChunk, length - done))};
    }
    for (int64_t i = piece > begin ? piece : begin; i < least(piece + pieces, end); ++i) {
      const int64_t done = (i - piece) * l.segment, left = chunks - done;
      l.pieces[i] = {chunk + done, int32_t(pieces > 1 ? least(l.segment, left) : left), int32_t(n), int32_t(i - piece),
                     int32_t(pieces)};
    }
    before += total;
    if (int64_t(before & 0xffffffffu) >= end && int64_t(before >> 32) >= end) return;  // the whole block
  }
}

}  // namespace

void fill_lists(GpuStream stream, const Documents& documents, const Plan& plan, const Workspace& w) {
  const int64_t entries = plan.chunks > plan.pieces ? plan.chunks : plan.pieces;
  launch(fill_kernel, ceil_div(entries, kThreads), kThreads, 0, stream)(
      Lists{documents.gpu_offsets, documents.count(), plan.segment, reinterpret_cast<Chunk*>(w.chunks.gpu<int64_t>()),
            reinterpret_cast<Piece*>(w.pieces.gpu<int64_t>())});
}

}  // namespace tessera::ops::kda::cuda
