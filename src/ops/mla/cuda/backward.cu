// Attention backward on the tensor cores, from the log-sum-exp of each row, with delta_i = <do_i, o_i>:
//
//   P = exp(S - lse),  dP = do V^T,  dS = P o (dP - delta),
//   dV = P^T do,   dk = scale dS^T q,   dq = scale dS k,   dk_shared = sum over heads of the last d_p columns of dk
//
// Heads of 128 + 64 / 128 have kernels of their own (sm90_backward.cu). Here, for all others and for rows that are not
// whole vectors: two kernels, each of which owns what it sums: a block of keys walks the queries and makes dk and dV, a
// block of queries walks the keys and makes dq. S and dP are computed in both (2304 flops a pair instead of 1664 at
// 192/128); in return nothing is added across blocks, so the bits never vary and dq needs no float32 copy. The first
// works on the transposes S^T = K Q^T and dP^T = V do^T: rows of a warp are its 16 keys, and P^T and dS^T go from one
// product to the next in registers. Heads' parts of dk_shared are added in head order by a small kernel.
//
// A document's first token sees itself alone: its dS is 0, where dP - delta would leave the rounding of two sums. Rows
// are counted among the queries of a document, masks go by positions (tiles.h).
#include "ops/mla/cuda/sm90.h"

namespace tessera::ops::mla::cuda {
namespace {

constexpr int kOwn = 16 * kWarps;  // rows that a block owns: keys in the first kernel, queries in the second
constexpr int kOther = 64;         // rows of a tile that it walks over
constexpr int kStep = 32;          // of these at a time, so that S and dP fit into registers beside the sums

// Shared memory, in elements: own rows (of width DK, then DV), two stages of other rows, two of (kOther) lse and delta.
template <int DK, int DV>
struct Layout {
  static constexpr int kOwnTile = kOwn * (pitch_of(DK) + pitch_of(DV));
  static constexpr int kStage = kOther * (pitch_of(DK) + pitch_of(DV));
  static constexpr int64_t kBytes = 2 * (kOwnTile + 2 * kStage) + 2 * 2 * kOther * 4;

  bf16* memory;
  __device__ bf16* own_k() const { return memory; }
  __device__ bf16* own_v() const { return memory + kOwn * pitch_of(DK); }
  __device__ bf16* other_k(int stage) const { return memory + kOwnTile + stage * kStage; }
  __device__ bf16* other_v(int stage) const { return other_k(stage) + kOther * pitch_of(DK); }
  __device__ float* lse(int stage) const {
    return reinterpret_cast<float*>(memory + kOwnTile + 2 * kStage) + stage * 2 * kOther;
  }
  __device__ float* delta(int stage) const { return lse(stage) + kOther; }
};

// delta, one row by 16 threads.
__global__ void __launch_bounds__(kThreads) delta_kernel(const Arguments a) {
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 16) + threadIdx.x / 16;
  const bool present = row < a.tokens * a.heads;
  float dot = 0;
  for (int c = threadIdx.x % 16 * 8; present && c < a.value_dim; c += 128) {
    float o[8], d_o[8];
    load8(a.o + row * a.value_dim + c, a.value_dim - c, a.whole, o);
    load8(a.d_o + row * a.value_dim + c, a.value_dim - c, a.whole, d_o);
#pragma unroll
    for (int i = 0; i < 8; ++i) dot += o[i] * d_o[i];
  }
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
  if (present && threadIdx.x % 16 == 0) a.delta[row] = dot;
}

// lse (times log2(e)) and delta of query i; past the document's end such that P = dS = 0.
struct RowTerms {
  float lse, delta;
};
__device__ RowTerms row_terms(const Arguments& a, const Block& block, int i) {
  if (i >= block.queries) return {INFINITY, 0.0f};
  const int64_t at = (block.query_begin + i) * a.heads + block.head;
  return {a.lse[at] * kLog2e, a.delta[at]};
}

template <int DK, int DV>
struct KeySums {
  float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
};

// The warp's 16 keys, whose first is `key`, against kStep queries from position `query` on.
template <int DK, int DV>
__device__ void key_step(KeySums<DK, DV>& sums, const bf16* keys, const bf16* values, const bf16* queries,
                         const bf16* d_outputs, const float* lse, const float* delta, int key, int query,
                         float scale_log2) {
  const int lane = threadIdx.x % 32;
  float s[kStep / 8][4] = {}, dp[kStep / 8][4] = {};
  multiply_transposed<DK / 16, kStep / 16>(s, keys, queries, pitch_of(DK));
  multiply_transposed<DV / 16, kStep / 16>(dp, values, d_outputs, pitch_of(DV));
  const bool masked = key + 15 > query;
#pragma unroll
  for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = n * 8 + lane % 4 * 2 + e % 2;
      float p = exp2_fast(s[n][e] * scale_log2 - lse[i]), ds = p * (dp[n][e] - delta[i]);
      if (masked) {
        const bool seen = key + lane / 4 + e / 2 * 8 <= query + i;
        p = seen ? p : 0.0f;
        ds = seen && query + i > 0 ? ds : 0.0f;
      }
      s[n][e] = p;
      dp[n][e] = ds;
    }
  }
  Fragment f[kStep / 16];
  round_to_fragments(f, s);
  multiply<kStep / 16, DV / 16>(sums.dv, f, d_outputs, pitch_of(DV));
  round_to_fragments(f, dp);
  multiply<kStep / 16, DK / 16>(sums.dk, f, queries, pitch_of(DK));
}

template <int DK, int DV>
__device__ void write_key_rows(const Arguments& a, const Block& block, const KeySums<DK, DV>& sums, int key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = key + lane / 4 + i * 8;
    if (own >= block.keys) continue;
    const int64_t at = (block.key_begin + own) * a.heads + block.head;
    bf16* dkv = a.dkv + at * a.kv_dim();
    float* part = a.dk_shared_parts + at * a.rope_dim;
#pragma unroll
    for (int n = 0; n < DV / 8; ++n) {
      store_two(dkv + a.nope_dim, n * 8 + lane % 4 * 2, a.value_dim, a.whole, sums.dv[n][2 * i], sums.dv[n][2 * i + 1]);
    }
#pragma unroll
    for (int n = 0; n < DK / 8; ++n) {
      const int c = n * 8 + lane % 4 * 2;
      const float x = sums.dk[n][2 * i] * a.scale, y = sums.dk[n][2 * i + 1] * a.scale;
      store_two(dkv, c, a.nope_dim, a.whole, x, y);
      if (c >= a.nope_dim && c < a.key_dim()) part[c - a.nope_dim] = x;
      if (c + 1 >= a.nope_dim && c + 1 < a.key_dim()) part[c + 1 - a.nope_dim] = y;
    }
  }
}

template <int DK, int DV>
__global__ void __launch_bounds__(kThreads, 1) key_kernel(const Arguments a) {
  extern __shared__ __align__(16) bf16 memory[];
  const Layout<DK, DV> tiles{memory};
  Block block;
  if (!find_block<kOwn, Side::keys>(a, block)) return;
  const Rows queries = query_rows(a, block), d_outputs = d_output_rows(a, block);
  const int from = max(block.first - block.position(0), 0);  // the first query that sees a key of the block
  const int count = (block.queries - from + kOther - 1) / kOther, warp = threadIdx.x / 32;
  const auto load = [&](int tile) {
    const int stage = tile % 2, first = from + tile * kOther;
    load_tile<kOther, DK>(tiles.other_k(stage), queries, first, block.queries, a.whole);
    load_tile<kOther, DV>(tiles.other_v(stage), d_outputs, first, block.queries, a.whole);
    if (threadIdx.x < kOther) {
      const RowTerms terms = row_terms(a, block, first + static_cast<int>(threadIdx.x));
      tiles.lse(stage)[threadIdx.x] = terms.lse;
      tiles.delta(stage)[threadIdx.x] = terms.delta;
    }
  };
  if (count > 0) {  // 0: a document without queries, whose gradients are 0
    load_tile<kOwn, DK>(tiles.own_k(), key_rows(a, block), block.first, block.keys, a.whole);
    load_tile<kOwn, DV>(tiles.own_v(), value_rows(a, block), block.first, block.keys, a.whole);
    load(0);
  }
  KeySums<DK, DV> sums;
  const int key = block.first + warp * 16;  // the warp's first
  for (int tile = 0; tile < count; ++tile) {
    wait_for_copies();
    __syncthreads();  // all have this tile, and are done with the one that the next overwrites
    if (tile + 1 < count) load(tile + 1);
    const int stage = tile % 2;
#pragma unroll 1
    for (int i = 0; i < kOther; i += kStep) {
      const int query = block.position(from + tile * kOther + i);
      if (query + kStep - 1 < key) continue;
      key_step<DK, DV>(sums, tiles.own_k() + warp * 16 * pitch_of(DK), tiles.own_v() + warp * 16 * pitch_of(DV),
                       tiles.other_k(stage) + i * pitch_of(DK), tiles.other_v(stage) + i * pitch_of(DV),
                       tiles.lse(stage) + i, tiles.delta(stage) + i, key, query, a.scale * kLog2e);
    }
  }
  write_key_rows<DK, DV>(a, block, sums, key);
}

// The warp's 16 queries, whose first stands at position `query`, against kStep keys from `key` on.
template <int DK, int DV>
__device__ void query_step(float (&dq)[DK / 8][4], const bf16* queries, const bf16* d_outputs, const bf16* keys,
                           const bf16* values, const RowTerms (&terms)[2], int query, int key, float scale_log2) {
  const int lane = threadIdx.x % 32;
  float s[kStep / 8][4] = {}, dp[kStep / 8][4] = {};
  multiply_transposed<DK / 16, kStep / 16>(s, queries, keys, pitch_of(DK));
  multiply_transposed<DV / 16, kStep / 16>(dp, d_outputs, values, pitch_of(DV));
  const bool masked = key + kStep - 1 > query;
#pragma unroll
  for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = query + lane / 4 + e / 2 * 8;
      float ds = exp2_fast(s[n][e] * scale_log2 - terms[e / 2].lse) * (dp[n][e] - terms[e / 2].delta);
      if (masked) ds = key + n * 8 + lane % 4 * 2 + e % 2 <= i && i > 0 ? ds : 0.0f;
      dp[n][e] = ds;
    }
  }
  Fragment f[kStep / 16];
  round_to_fragments(f, dp);
  multiply<kStep / 16, DK / 16>(dq, f, keys, pitch_of(DK));
}

template <int DK, int DV>
__global__ void __launch_bounds__(kThreads, 1) query_kernel(const Arguments a) {
  extern __shared__ __align__(16) bf16 memory[];
  const Layout<DK, DV> tiles{memory};
  Block block;
  if (!find_block<kOwn, Side::queries>(a, block)) return;
  const Rows keys = key_rows(a, block), values = value_rows(a, block);
  const int end = min(block.position(block.first + kOwn), block.keys), count = (end + kOther - 1) / kOther;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = block.first + warp * 16, query = block.position(row);  // the warp's first
  const auto load = [&](int tile) {
    load_tile<kOther, DK>(tiles.other_k(tile % 2), keys, tile * kOther, block.keys, a.whole);
    load_tile<kOther, DV>(tiles.other_v(tile % 2), values, tile * kOther, block.keys, a.whole);
  };
  load_tile<kOwn, DK>(tiles.own_k(), query_rows(a, block), block.first, block.queries, a.whole);
  load_tile<kOwn, DV>(tiles.own_v(), d_output_rows(a, block), block.first, block.queries, a.whole);
  load(0);
  const RowTerms terms[2] = {row_terms(a, block, row + lane / 4), row_terms(a, block, row + lane / 4 + 8)};
  float dq[DK / 8][4] = {};
  for (int tile = 0; tile < count; ++tile) {
    wait_for_copies();
    __syncthreads();  // all have this tile, and are done with the one that the next overwrites
    if (tile + 1 < count) load(tile + 1);
#pragma unroll 1
    for (int j = 0; j < kOther; j += kStep) {
      const int key = tile * kOther + j;
      if (key > query + 15) continue;
      query_step<DK, DV>(dq, tiles.own_k() + warp * 16 * pitch_of(DK), tiles.own_v() + warp * 16 * pitch_of(DV),
                         tiles.other_k(tile % 2) + j * pitch_of(DK), tiles.other_v(tile % 2) + j * pitch_of(DV), terms,
                         query, key, a.scale * kLog2e);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = row + lane / 4 + i * 8;
    if (own >= block.queries) continue;
    bf16* to = a.dq + ((block.query_begin + own) * a.heads + block.head) * a.key_dim();
#pragma unroll
    for (int n = 0; n < DK / 8; ++n) {
      store_two(to, n * 8 + lane % 4 * 2, a.key_dim(), a.whole, dq[n][2 * i] * a.scale, dq[n][2 * i + 1] * a.scale);
    }
  }
}

__global__ void __launch_bounds__(kThreads) add_heads(const Arguments a) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.key_tokens * a.rope_dim) return;
  const int64_t token = i / a.rope_dim, c = i % a.rope_dim;
  float sum = 0;
  for (int64_t h = 0; h < a.heads; ++h) sum += a.dk_shared_parts[(token * a.heads + h) * a.rope_dim + c];
  a.dk_shared[token * a.d_shared_stride + c] = __float2bfloat16_rn(sum);
}

}  // namespace

void backward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved,
              const OutputGrads& dout, const Grads& grads, const BackwardWorkspace& w) {
  Arguments a = arguments(d, in);
  a.o = out.o.gpu<bf16>(), a.lse = saved.lse.gpu<float>(), a.d_o = dout.o.gpu<bf16>();
  a.delta = w.delta.gpu<float>(), a.dk_shared_parts = w.dk_shared_parts.gpu<float>();
  a.dq = grads.q.gpu<bf16>(), a.dkv = grads.kv.gpu<bf16>(), a.dk_shared = grads.k_shared.gpu<bf16>();
  a.d_shared_stride = grads.k_shared.row_stride();
  a.whole = a.whole && eights(out.o, dout.o, grads.q, grads.kv);
  if (a.whole && sm90::takes(d, in, dout)) {
    sm90::backward(stream, d, in, dout, a, w);
  } else {
    launch(delta_kernel, ceil_div(d.tokens * d.heads, kThreads / 16), kThreads, 0, stream)(a);
    choose_tiles(d, [&]<int DK, int DV>() {
      constexpr int64_t kBytes = Layout<DK, DV>::kBytes;
      launch(key_kernel<DK, DV>, block_numbers<kOwn, Side::keys>(a) * d.heads, kThreads, kBytes, stream)(a);
      launch(query_kernel<DK, DV>, block_numbers<kOwn, Side::queries>(a) * d.heads, kThreads, kBytes, stream)(a);
    });
  }
  launch(add_heads, ceil_div(a.key_tokens * d.rope_dim, kThreads), kThreads, 0, stream)(a);
}

}  // namespace tessera::ops::mla::cuda
