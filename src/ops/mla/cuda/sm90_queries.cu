// For each tile of 64 queries, before the attention backward for sm_90: its log-sum-exps and delta, 512 bytes in one
// piece that the copy engine brings with the rows. After it: the tile's float32 sums to dq. Both are bound by memory:
// o and do once (512 bytes a query and head), the sums and dq once (1152 bytes).
#include "ops/mla/cuda/sm90.h"

namespace tessera::ops::mla::cuda::sm90 {
namespace {

constexpr int kQueries = kQueryTile;

// What queries bring beside their rows; past the document's end such that P = dS = 0. A row by 16 threads.
__global__ void __launch_bounds__(kThreads) terms_kernel(const Arguments a, const Work w) {
  const int64_t number = blockIdx.x % w.query_numbers, head = blockIdx.x / w.query_numbers;
  Block block;
  if (!block_at<kQueries, Side::queries>(a, number, head, block)) return;
  float* terms = w.terms + int64_t(blockIdx.x) * 2 * kQueries;
  const int c = threadIdx.x % 16 * 8;
#pragma unroll
  for (int i = threadIdx.x / 16; i < kQueries; i += kThreads / 16) {
    const int query = block.first + i;
    const bool present = query < block.queries;
    const int64_t row = (block.query_begin + query) * a.heads + head;
    float dot = 0;
    if (present) {
      float o[8], d_o[8];
      load8(a.o + row * kValue + c, o);
      load8(a.d_o + row * kValue + c, d_o);
#pragma unroll
      for (int e = 0; e < 8; ++e) dot += o[e] * d_o[e];
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
    if (c != 0) continue;
    terms[i] = present ? a.lse[row] * kLog2e : INFINITY;
    terms[kQueries + i] = dot;
  }
}

// A tile of sums to dq: a thread takes eight columns of two rows. Column groups 0 to 11 are the first half; the second
// begins with 16 to 23.
__global__ void __launch_bounds__(kThreads) query_kernel(const Arguments a, const Work w) {
  const int64_t number = blockIdx.x % w.query_numbers, head = blockIdx.x / w.query_numbers;
  Block block;
  if (!block_at<kQueries, Side::queries>(a, number, w.head_begin + head, block)) return;
  const float4* tile = reinterpret_cast<const float4*>(w.sums + int64_t(blockIdx.x) * (2 * kHalfSums));
#pragma unroll
  for (int i = threadIdx.x; i < kQueries / 2 * (kKey / 8); i += kThreads) {
    const int column = i % (kKey / 8), pair = i / (kKey / 8), row = pair / 8 * 16 + pair % 8;
    const int half = column < 12 ? 0 : 1, in_half = column < 12 ? column : (column < 16 ? column - 4 : column - 16);
    const float4* from = tile + half * (kHalfSums / 4) + in_half * kGroup + pair * 4;
    float upper[8], lower[8];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float4 four = from[e];
      upper[2 * e] = four.x * a.scale, upper[2 * e + 1] = four.y * a.scale;
      lower[2 * e] = four.z * a.scale, lower[2 * e + 1] = four.w * a.scale;
    }
    const int query = block.first + row;
    bf16* to = a.dq + ((block.query_begin + query) * a.heads + block.head) * kKey + column * 8;
    if (query < block.queries) store8(to, upper);
    if (query + 8 < block.queries) store8(to + 8 * a.heads * kKey, lower);
  }
}

}  // namespace

void write_terms(GpuStream stream, const Arguments& a, const Work& w) {
  launch(terms_kernel, w.query_numbers * a.heads, kThreads, 0, stream)(a, w);
}

void round_sums(GpuStream stream, const Arguments& a, const Work& w) {
  launch(query_kernel, w.query_numbers * w.heads, kThreads, 0, stream)(a, w);
}

}  // namespace tessera::ops::mla::cuda::sm90
