// A launch over many tensors: pieces of contiguous memory, handed to the kernel as its parameter (nothing to upload, to
// keep or to wait for) and cut into chunks of kChunkElements, a block of threads each. Chunks do not reach across a
// block of a slot.
#pragma once

#include <algorithm>

#include "core/cuda/kernel.h"
#include "optim/chunks.h"
#include "optim/cuda.h"

namespace tessera::optim::cuda {

using namespace tessera::cuda;
using tessera::cuda::bf16;

inline constexpr int kThreads = 256;
inline constexpr int kPieces = 48;  // 3 KiB; a kernel's parameters may have 4
static_assert(kBatchRuns <= kPieces);

struct Piece {
  const float* gradient = nullptr;
  float* value = nullptr;
  float* first = nullptr;   // momentum, or the first moment
  float* second = nullptr;  // AdamW
  bf16* copy = nullptr;     // of the value; null: none
  int64_t first_chunk = 0;  // counted from the first piece
  int64_t elements = 0;     // of a block
  float keep = 1;           // 1 - learning rate * weight decay
  bool decay_idle = true;   // false: a block without gradient keeps its value
  bool whole = false;       // every chunk can be read eight elements at a time
};

struct Pieces {
  Piece piece[kPieces];
  int count = 0;
  int64_t chunks = 0;

  void add(Piece p, int64_t blocks) {
    p.first_chunk = chunks;
    piece[count++] = p;
    chunks += blocks * chunks_of(p.elements);
  }
};

// Where a chunk lies: `begin` counts elements from the piece's beginning, `offset` from its block's.
struct Chunk {
  int piece;
  int64_t offset, begin, count;
};

__device__ inline Chunk chunk_of(const Pieces& pieces, int64_t chunk) {
  int low = 0, high = pieces.count;
  while (high - low > 1) {  // the last piece that begins at or before the chunk
    const int middle = (low + high) / 2;
    (pieces.piece[middle].first_chunk <= chunk ? low : high) = middle;
  }
  const int64_t elements = pieces.piece[low].elements, in_piece = chunk - pieces.piece[low].first_chunk;
  const int64_t per_block = (elements + kChunkElements - 1) / kChunkElements;
  const int64_t offset = in_piece % per_block * kChunkElements, left = elements - offset;
  return {low, offset, in_piece / per_block * elements + offset, left < kChunkElements ? left : kChunkElements};
}

// Calls f(i, left) for this thread's eights of a chunk: i from its beginning, left elements from there to its end.
template <class F>
__device__ void for_eights(const Chunk& chunk, F&& f) {
  for (int64_t i = threadIdx.x * 8; i < chunk.count; i += kThreads * 8) f(i, chunk.count - i);
}

inline bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }  // for load8 and store8

// `rows` sums of `count` neighbouring numbers each, in a fixed order.
void sum_rows(GpuStream, const double* from, int64_t rows, int64_t count, double* to);

}  // namespace tessera::optim::cuda
