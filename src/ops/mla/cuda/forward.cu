// Attention forward on the tensor cores: a block of 128 queries of one document and head against tiles of 64 keys,
//
//   m' = max(m, max S),   P = exp(S - m'),   l' = l exp(m - m') + sum P,   O' = O exp(m - m') + P V,   o = O / l
//
// Each of the 8 warps owns 16 queries, whole: Q, S, P and O live in its registers and rows need no exchange between
// warps. Keys and values are brought in by cp.async one tile ahead, so that one barrier a tile is enough. Exponents are
// of base 2. Floor: 2 (d_n + d_p + d_v) flops a causal pair on the tensor cores; q, kv and o move once, keys and values
// again for each block of queries but from the L2 cache.
#include "ops/mla/cuda/rows.h"
#include "ops/mla/cuda/sm90.h"

namespace tessera::ops::mla::cuda {
namespace {

constexpr int kQueries = 16 * kWarps, kKeys = 64;

// Shared memory, in elements: queries, then two stages of keys and values.
template <int DK, int DV>
struct Layout {
  static constexpr int kQueryTile = kQueries * pitch_of(DK);
  static constexpr int kKeyTile = kKeys * pitch_of(DK), kValueTile = kKeys * pitch_of(DV);
  static constexpr int64_t kBytes = 2 * (kQueryTile + 2 * (kKeyTile + kValueTile));

  bf16* memory;
  __device__ bf16* queries() const { return memory; }
  __device__ bf16* keys(int stage) const { return memory + kQueryTile + stage * kKeyTile; }
  __device__ bf16* values(int stage) const { return memory + kQueryTile + 2 * kKeyTile + stage * kValueTile; }
};

// A thread's part of 16 rows: its two rows' maximum (times log2(e)) and the sum over its own columns.
template <int DV>
struct Rows16 {
  float o[DV / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};
};

// The warp's rows, whose first stands at position `row` of the document, against keys [key, key + kKeys).
template <int DK, int DV>
__device__ void attend(Rows16<DV>& r, const Fragment (&q)[DK / 16], const bf16* keys, const bf16* values, int row,
                       int key, float scale_log2) {
  const int lane = threadIdx.x % 32;
  float s[kKeys / 8][4] = {};
  multiply_transposed<DK / 16, kKeys / 16>(s, q, keys, pitch_of(DK));
  const bool masked = key + kKeys - 1 > row;
  float top[2] = {r.maximum[0], r.maximum[1]};
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] *= scale_log2;
      if (masked && key + n * 8 + lane % 4 * 2 + e % 2 > row + lane / 4 + e / 2 * 8) s[n][e] = -INFINITY;
      top[e / 2] = fmaxf(top[e / 2], s[n][e]);
    }
  }
  float fade[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // every row sees key 0, so its maximum is finite from the first tile on
    top[i] = over_row(top[i], true);
    fade[i] = exp2_fast(r.maximum[i] - top[i]);
    r.maximum[i] = top[i];
    r.sum[i] *= fade[i];
  }
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = exp2_fast(s[n][e] - top[e / 2]);
      r.sum[e / 2] += s[n][e];
    }
  }
#pragma unroll
  for (int n = 0; n < DV / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) r.o[n][e] *= fade[e / 2];
  }
  Fragment p[kKeys / 16];
  round_to_fragments(p, s);
  multiply<kKeys / 16, DV / 16>(r.o, p, values, pitch_of(DV));
}

template <int DV>
__device__ void write_rows(const Arguments& a, const Block& block, Rows16<DV>& r, int row) {
  const int lane = threadIdx.x % 32;
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = row + lane / 4 + i * 8;
    const float sum = over_row(r.sum[i], false), inverse = 1 / sum;
    if (own >= block.queries) continue;
    top = fmaxf(top, r.maximum[i] * kLn2);
    const int64_t at = (block.query_begin + own) * a.heads + block.head;
#pragma unroll
    for (int n = 0; n < DV / 8; ++n) {
      store_two(a.o + at * a.value_dim, n * 8 + lane % 4 * 2, a.value_dim, a.whole, r.o[n][2 * i] * inverse,
                r.o[n][2 * i + 1] * inverse);
    }
    if (a.lse != nullptr && lane % 4 == 0) a.lse[at] = r.maximum[i] * kLn2 + logf(sum);
  }
  if (a.max_logit == nullptr) return;
  top = warp_max(top);
  if (lane == 0 && top > -INFINITY) raise(a.max_logit + block.head, top);
}

template <int DK, int DV>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const Arguments a) {
  extern __shared__ __align__(16) bf16 memory[];
  const Layout<DK, DV> tiles{memory};
  Block block;
  if (!find_block<kQueries, Side::queries>(a, block)) return;
  const Rows keys = key_rows(a, block), values = value_rows(a, block);
  const int end = min(block.position(block.first + kQueries), block.keys), count = (end + kKeys - 1) / kKeys;
  const int row = block.first + threadIdx.x / 32 * 16, position = block.position(row);  // the warp's first
  const auto load = [&](int tile) {
    load_tile<kKeys, DK>(tiles.keys(tile % 2), keys, tile * kKeys, block.keys, a.whole);
    load_tile<kKeys, DV>(tiles.values(tile % 2), values, tile * kKeys, block.keys, a.whole);
  };
  load_tile<kQueries, DK>(tiles.queries(), query_rows(a, block), block.first, block.queries, a.whole);
  load(0);
  wait_for_copies();
  __syncthreads();
  Fragment q[DK / 16];
#pragma unroll
  for (int k = 0; k < DK / 16; ++k) {
    load_a(q[k], tiles.queries() + threadIdx.x / 32 * 16 * pitch_of(DK) + k * 16, pitch_of(DK));
  }
  Rows16<DV> r;
  for (int tile = 0; tile < count; ++tile) {
    if (tile > 0) {
      wait_for_copies();
      __syncthreads();  // all have this tile, and are done with the one that the next overwrites
    }
    if (tile + 1 < count) load(tile + 1);
    if (tile * kKeys <= position + 15) {
      attend<DK, DV>(r, q, tiles.keys(tile % 2), tiles.values(tile % 2), position, tile * kKeys, a.scale * kLog2e);
    }
  }
  write_rows<DV>(a, block, r, row);
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  Arguments a = arguments(d, in);
  a.o = out.o.gpu<bf16>();
  a.whole = a.whole && eights(out.o);
  if (saved != nullptr) a.lse = saved->lse.gpu<float>();
  if (out.max_logit.present()) a.max_logit = out.max_logit.gpu<float>();
  if (sm90::takes(d, in)) return sm90::forward(stream, d, in, a);
  choose_tiles(d, [&]<int DK, int DV>() {
    launch(forward_kernel<DK, DV>, block_numbers<kQueries, Side::queries>(a) * d.heads, kThreads,
           Layout<DK, DV>::kBytes, stream)(a);
  });
}

}  // namespace tessera::ops::mla::cuda
