// The counting sort. A warp owns a chunk of kChunkSlots slots: it counts them, and once the counts of the chunks before
// it are summed it gives each slot its row. Inside a chunk slots pass 32 at a time; those of one expert find each other
// by a match over the warp, and their order among themselves is the order of the lanes. Integers only, and every place
// is a function of the indices, so the sort is stable and always the same.
//
// Traffic is some 30 bytes a slot, nothing beside the rows that it orders (2 L bytes a slot and product).
#include "core/cuda/kernel.h"
#include "ops/experts/cuda/order.h"

namespace tessera::ops::experts::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kGroups = 32;    // of chunks, in the scan
constexpr int kLayout = 1024;  // threads that lay out the experts
constexpr unsigned kAll = 0xffffffffu;

// Counts of a chunk; a choice of an expert that does not exist stops the program.
__global__ void count_chunk(const int32_t* indices, int64_t slots, int experts, int32_t* chunks) {
  extern __shared__ int32_t counts[];  // (E)
  for (int e = threadIdx.x; e < experts; e += 32) counts[e] = 0;
  __syncwarp();
  const int64_t begin = int64_t(blockIdx.x) * kChunkSlots, end = min(begin + kChunkSlots, slots);
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += 32) {
    const int32_t e = indices[slot];
    if (e < -1 || e >= experts) __trap();
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  __syncwarp();
  for (int e = threadIdx.x; e < experts; e += 32) chunks[int64_t(blockIdx.x) * experts + e] = counts[e];
}

// Counts of chunks become counts of all chunks before; (32 experts, kGroups) threads a block.
__global__ void scan_chunks(int32_t* chunks, int64_t count, int experts, int64_t* counts) {
  __shared__ int32_t sums[kGroups][32];
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int e = int(blockIdx.x) * 32 + lane;
  const int64_t begin = count * group / kGroups, end = count * (group + 1) / kGroups;
  int32_t sum = 0;
  if (e < experts) {
    for (int64_t c = begin; c < end; ++c) sum += chunks[c * experts + e];
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (e >= experts) return;
  int32_t before = 0;
  for (int g = 0; g < group; ++g) before += sums[g][lane];
  for (int64_t c = begin; c < end; ++c) {
    const int32_t own = chunks[c * experts + e];
    chunks[c * experts + e] = before;
    before += own;
  }
  if (group == kGroups - 1) counts[e] = before;
}

// Where each expert's blocks of rows begin, and whose each block is. One block of threads.
__global__ void __launch_bounds__(kLayout)
    lay_out(const int64_t* counts, int experts, int64_t capacity, int64_t* offsets, int32_t* blocks) {
  __shared__ int32_t of_warps[kLayout / 32];
  extern __shared__ int32_t starts[];  // (E + 1): first block
  const auto blocks_of = [&](int e) { return int32_t((counts[e] + kBlockRows - 1) / kBlockRows); };
  const int share = (experts + kLayout - 1) / kLayout, tid = int(threadIdx.x), lane = tid % 32;
  const int begin = min(tid * share, experts), end = min(begin + share, experts);
  int32_t own = 0;
  for (int e = begin; e < end; ++e) own += blocks_of(e);
  int32_t through = own;  // of this warp, up to this thread
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t lower = __shfl_up_sync(kAll, through, offset);
    if (lane >= offset) through += lower;
  }
  if (lane == 31) of_warps[tid / 32] = through;
  __syncthreads();
  int32_t at = through - own;
  for (int w = 0; w < tid / 32; ++w) at += of_warps[w];
  for (int e = begin; e < end; ++e) {
    starts[e] = at;
    offsets[e] = at * kBlockRows;
    at += blocks_of(e);
  }
  if (tid == kLayout - 1) {
    starts[experts] = at;
    offsets[experts] = at * kBlockRows;
  }
  __syncthreads();
  for (int64_t block = tid; block < capacity; block += kLayout) {
    int32_t expert = -1;
    if (block < starts[experts]) {
      int low = 0, high = experts;  // starts[low] <= block < starts[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= block ? low : high) = middle;
      }
      expert = low;
    }
    blocks[block] = expert;
  }
}

__global__ void assign_rows(const int32_t* indices, int64_t count, int experts, const int32_t* chunks,
                            const int64_t* offsets, int64_t* slots, int64_t* rows) {
  extern __shared__ int32_t next[];  // (E): rows of the expert given so far
  const int lane = int(threadIdx.x);
  for (int e = lane; e < experts; e += 32) next[e] = chunks[int64_t(blockIdx.x) * experts + e];
  __syncwarp();
  const int64_t begin = int64_t(blockIdx.x) * kChunkSlots, end = min(begin + kChunkSlots, count);
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t slot = first + lane;
    const int32_t e = slot < end ? indices[slot] : -1;
    const unsigned same = __match_any_sync(kAll, e);
    const int before = __popc(same & ((1u << lane) - 1));
    if (e >= 0) {
      const int64_t row = offsets[e] + next[e] + before;
      slots[row] = slot;
      rows[slot] = row;
    } else if (slot < end) {
      rows[slot] = -1;
    }
    __syncwarp();
    if (e >= 0 && before == 0) next[e] += __popc(same);
    __syncwarp();
  }
}

}  // namespace

void order_by_expert(GpuStream stream, const Dims& d, const View& indices, const Saved& saved, const View& chunks) {
  const int64_t slots = d.tokens * d.top_k, shared = d.experts * 4;
  TESSERA_CHECK(row_capacity(d) < (int64_t{1} << 31), "{} tokens of {} experts each in one call: too many rows",
                d.tokens, d.top_k);
  const int32_t* chosen = indices.gpu<int32_t>();
  int32_t* of_chunks = chunks.gpu<int32_t>();
  int64_t *offsets = saved.offsets.gpu<int64_t>(), *counts = saved.counts.gpu<int64_t>();
  TESSERA_CUDA(cudaMemsetAsync(saved.slots.data(), 0xff, size_t(saved.slots.bytes()), stream));  // -1
  launch(count_chunk, chunks.dim(0), 32, shared, stream)(chosen, slots, d.experts, of_chunks);
  launch(scan_chunks, ceil_div(d.experts, 32), 32 * kGroups, 0, stream)(of_chunks, chunks.dim(0), d.experts, counts);
  launch(lay_out, 1, kLayout, shared + 4, stream)(counts, d.experts, saved.blocks.dim(0), offsets,
                                                  saved.blocks.gpu<int32_t>());
  launch(assign_rows, chunks.dim(0), 32, shared, stream)(chosen, slots, d.experts, of_chunks, offsets,
                                                         saved.slots.gpu<int64_t>(), saved.rows.gpu<int64_t>());
}

}  // namespace tessera::ops::experts::cuda
