// Tokens sorted by id, stable: tokens of one id keep their order. A radix sort from the lowest 8 bits up, one pass for
// vocabularies to 256 entries, three to 16 million. A pass counts the digits of each tile, turns the counts into first
// places (all tiles of digit 0, then of digit 1, ...), and moves each tile's tokens, in order.
//
// Integers only, and a token's place does not depend on timing. The time is that of a few reads of 8 bytes a token,
// small beside the rows that are added afterwards; the temporary memory is a function of the shape, known without a
// GPU.
#include <bit>

#include "core/cuda/kernel.h"
#include "ops/embedding/cuda/sort.h"

namespace tessera::ops::embedding::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = kDigits, kWarps = kThreads / 32, kRounds = kSortTile / kThreads;
constexpr int kScanThreads = 1024;

// One pass, by the digit `shift` bits up.
struct Pass {
  int64_t count, tiles;
  int shift;
  const int32_t *from_ids, *from_tokens;  // tokens null: the first pass, where token i has place i
  int32_t *to_ids, *to_tokens;
  int32_t* counts;  // (kDigits, tiles)
};

__device__ int digit_of(int32_t id, int shift) { return (id >> shift) & int(kDigits - 1); }

__global__ void __launch_bounds__(kThreads) count_digits(Pass p) {
  __shared__ int counts[kDigits];
  counts[threadIdx.x] = 0;
  __syncthreads();
  for (int r = 0; r < kRounds; ++r) {
    const int64_t i = int64_t(blockIdx.x) * kSortTile + r * kThreads + threadIdx.x;
    if (i < p.count) atomicAdd(&counts[digit_of(p.from_ids[i], p.shift)], 1);
  }
  __syncthreads();
  p.counts[threadIdx.x * p.tiles + blockIdx.x] = counts[threadIdx.x];
}

// counts[i] becomes the sum of those before it. One block; a thread has a range of neighbours.
__global__ void __launch_bounds__(kScanThreads) scan(int32_t* counts, int64_t elements) {
  __shared__ int of_warps[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t begin = elements * threadIdx.x / kScanThreads, end = elements * (threadIdx.x + 1) / kScanThreads;
  int own = 0;
  for (int64_t i = begin; i < end; ++i) own += counts[i];
  int through = own;  // sum of this warp's lanes up to this one
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, through, offset);
    if (lane >= offset) through += below;
  }
  if (lane == 31) of_warps[warp] = through;
  __syncthreads();
  int before = through - own;
  for (int w = 0; w < warp; ++w) before += of_warps[w];
  for (int64_t i = begin; i < end; ++i) {
    const int count = counts[i];
    counts[i] = before;
    before += count;
  }
}

// A round moves kThreads neighbouring tokens: a token's place is the digit's first free one, plus the tokens of that
// digit in the warps before its own, plus those in the lanes before it.
__global__ void __launch_bounds__(kThreads) move_tokens(Pass p) {
  __shared__ int next[kDigits];
  __shared__ int of_warps[kWarps][kDigits];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  next[threadIdx.x] = p.counts[threadIdx.x * p.tiles + blockIdx.x];
  for (int r = 0; r < kRounds; ++r) {
    const int64_t i = int64_t(blockIdx.x) * kSortTile + r * kThreads + threadIdx.x;
    const bool live = i < p.count;
    const int32_t id = live ? p.from_ids[i] : 0;
    const int digit = live ? digit_of(id, p.shift) : int(kDigits);  // a digit of its own, counted nowhere
    for (int w = 0; w < kWarps; ++w) of_warps[w][threadIdx.x] = 0;
    __syncthreads();
    const unsigned same = __match_any_sync(0xffffffffu, digit);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (live && rank == 0) of_warps[warp][digit] = __popc(same);
    __syncthreads();
    int place = next[threadIdx.x];  // the thread's number is a digit here
    for (int w = 0; w < kWarps; ++w) {
      const int count = of_warps[w][threadIdx.x];
      of_warps[w][threadIdx.x] = place;
      place += count;
    }
    next[threadIdx.x] = place;
    __syncthreads();
    if (live) {
      const int to = of_warps[warp][digit] + rank;
      p.to_ids[to] = id;
      p.to_tokens[to] = p.from_tokens != nullptr ? p.from_tokens[i] : int32_t(i);
    }
    __syncthreads();
  }
}

}  // namespace

Sorted sort_by_id(GpuStream stream, const Dims& d, const int32_t* ids, const Workspace& w) {
  TESSERA_CHECK(d.tokens < (int64_t{1} << 31), "embedding of {} tokens in one call, at most 2^31 - 1", d.tokens);
  const int64_t tiles = ceil_div(d.tokens, kSortTile);
  const int bits = std::bit_width(static_cast<uint64_t>(d.vocabulary - 1));
  Sorted sorted{ids, nullptr};
  int side = 0;
  for (int shift = 0; shift == 0 || shift < bits; shift += 8, side = 1 - side) {
    const Pass pass{d.tokens,
                    tiles,
                    shift,
                    sorted.ids,
                    sorted.tokens,
                    w.ids.gpu<int32_t>() + side * d.tokens,
                    w.tokens.gpu<int32_t>() + side * d.tokens,
                    w.counts.gpu<int32_t>()};
    launch(count_digits, tiles, kThreads, 0, stream)(pass);
    launch(scan, 1, kScanThreads, 0, stream)(pass.counts, kDigits * tiles);
    launch(move_tokens, tiles, kThreads, 0, stream)(pass);
    sorted = {pass.to_ids, pass.to_tokens};
  }
  return sorted;
}

}  // namespace tessera::ops::embedding::cuda
