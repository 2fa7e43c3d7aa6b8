// Decode over latent caches on the tensor cores, W_kvb absorbed into the query and the output:
//
//   a_h = scale [q_n UK_h | q_p],   logit_j = a_h . cache_j,   m_h = sum_j p_j c_j,   o_h = UV_h m_h
//
// Floor: the bytes of the caches, read once for all heads (of up to 64; each 64 more read them again, from the L2
// cache). A thread block takes one piece of one sequence: heads are the rows of its products, tiles of 32 keys come in
// by cp.async one tile ahead, each warp owns 64 columns of the mixture. A piece's length follows from its sequence
// alone, so that a sequence's bits do not depend on the batch; pieces are merged in order.
#include "ops/mla/cuda/tiles.h"

namespace tessera::ops::mla::cuda {
namespace {

constexpr int kTileKeys = 32;
constexpr int kBatch = 64;    // sequences of a launch: pointers and lengths are its arguments
constexpr int kTogether = 8;  // sequences that share one read of kv_b
static_assert(kPieceTile == kTileKeys && kMaxRank == 64 * kWarps && kMaxLatent % 16 == 0);

struct Decode {
  int64_t sequences, heads;
  int nope_dim, rope_dim, value_dim, rank;
  float scale_log2;
  bool whole;  // rows may be read eight elements at a time
  const bf16 *q, *kv_b;
  bf16* query;
  float *maximum, *sum, *mixture, *merged;
  bf16* o;

  __device__ int width() const { return rank + rope_dim; }
  __device__ const bf16* up_keys(int64_t h) const { return kv_b + h * (nope_dim + value_dim) * rank; }  // UK_h (d_n, r)
  __device__ const bf16* up_values(int64_t h) const { return up_keys(h) + int64_t(nope_dim) * rank; }   // UV_h (d_v, r)
};

struct Caches {  // of the sequences [first, first + count)
  int64_t first;
  int count;
  const bf16* latent[kBatch];
  int64_t stride[kBatch];
  int keys[kBatch], piece_keys[kBatch];
  int64_t first_piece[kBatch + 1];
};

// One head, 128 columns, kTogether sequences.
__global__ void __launch_bounds__(128) absorb(const Decode a) {
  __shared__ float q[kTogether][kMaxKeyDim];
  const int key_dim = a.nope_dim + a.rope_dim, blocks = (a.width() + 127) / 128;
  const int64_t h = blockIdx.x / blocks % a.heads, n0 = blockIdx.x / blocks / a.heads * kTogether;
  for (int i = threadIdx.x; i < kTogether * key_dim; i += 128) {
    const int64_t n = n0 + i / key_dim;
    q[i / key_dim][i % key_dim] = n < a.sequences ? to_float(a.q[(n * a.heads + h) * key_dim + i % key_dim]) : 0.0f;
  }
  __syncthreads();
  const int c = blockIdx.x % blocks * 128 + threadIdx.x;
  if (c >= a.width()) return;
  float x[kTogether] = {};
  if (c < a.rank) {
    const bf16* up = a.up_keys(h) + c;
#pragma unroll 8
    for (int i = 0; i < a.nope_dim; ++i) {
      const float w = to_float(up[int64_t(i) * a.rank]);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) x[n] += q[n][i] * w;
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTogether; ++n) x[n] = q[n][a.nope_dim + c - a.rank];
  }
#pragma unroll
  for (int n = 0; n < kTogether; ++n) {
    if (n0 + n >= a.sequences) break;
    a.query[((n0 + n) * a.heads + h) * a.width() + c] = from_float<bf16>(x[n] * a.scale_log2);
  }
}

// Shared memory: queries of 16 M heads, two stages of latents, logits, weights and the factors of the running mixture.
template <int M>
struct Layout {
  static constexpr int kPitch = pitch_of(kMaxLatent), kLogitPitch = kTileKeys + 4;
  static constexpr int kQueryTile = 16 * M * kPitch, kLatentTile = kTileKeys * kPitch;
  static constexpr int kWeights = 16 * M * pitch_of(kTileKeys), kLogits = 16 * M * kLogitPitch;
  static constexpr int64_t kBytes = 2 * (kQueryTile + 2 * kLatentTile + kWeights) + 4 * (kLogits + 16 * M);

  bf16* memory;
  __device__ bf16* queries() const { return memory; }
  __device__ bf16* latents(int stage) const { return memory + kQueryTile + stage * kLatentTile; }
  __device__ bf16* weights() const { return latents(2); }
  __device__ float* logits() const { return reinterpret_cast<float*>(weights() + kWeights); }
  __device__ float* fade() const { return logits() + kLogits; }
};

// Logits of a tile, of which `keys` are present. A warp takes 16 heads and 16 keys.
template <int M>
__device__ void take_logits(const Layout<M>& tiles, const bf16* latents, int width, int keys) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= M * kTileKeys / 16) return;
  const int head = warp % M * 16, key = warp / M * 16;
  float s[2][4] = {};
  for (int k = 0; k < width; k += 16) {
    Fragment a[1];
    load_a(a[0], tiles.queries() + head * Layout<M>::kPitch + k, Layout<M>::kPitch);
    multiply_transposed<1, 1>(s, a, latents + key * Layout<M>::kPitch + k, Layout<M>::kPitch);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int j = key + n * 8 + lane % 4 * 2 + e % 2, i = head + lane / 4 + e / 2 * 8;
      tiles.logits()[i * Layout<M>::kLogitPitch + j] = j < keys ? s[n][e] : -INFINITY;
    }
  }
}

// A lane has one key, a warp the heads warp, warp + kWarps, ...; the first key of a tile is always present.
template <int M>
__device__ void soften(const Layout<M>& tiles, float (&maximum)[16 * M / kWarps], float (&sum)[16 * M / kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 16 * M / kWarps; ++i) {
    const int head = i * kWarps + warp;
    const float x = tiles.logits()[head * Layout<M>::kLogitPitch + lane], top = fmaxf(maximum[i], warp_max(x));
    const float p = exp2_fast(x - top), fade = exp2_fast(maximum[i] - top);
    maximum[i] = top;
    sum[i] = sum[i] * fade + warp_sum(p);
    tiles.weights()[head * pitch_of(kTileKeys) + lane] = from_float<bf16>(p);
    if (lane == 0) tiles.fade()[head] = fade;
  }
}

// The warp's 64 columns of the mixture of all heads.
template <int M>
__device__ void mix(const Layout<M>& tiles, const bf16* latents, float (&mixture)[M][8][4]) {
  const int column = threadIdx.x / 32 * 64, lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float fade[2] = {tiles.fade()[m * 16 + lane / 4], tiles.fade()[m * 16 + lane / 4 + 8]};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) mixture[m][n][e] *= fade[e / 2];
    }
  }
#pragma unroll
  for (int k = 0; k < kTileKeys; k += 16) {
    Fragment p[M];
#pragma unroll
    for (int m = 0; m < M; ++m) load_a(p[m], tiles.weights() + m * 16 * pitch_of(kTileKeys) + k, pitch_of(kTileKeys));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      Fragment f;
      load_b(f, latents + k * Layout<M>::kPitch + column + n * 16, Layout<M>::kPitch);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma(mixture[m][2 * n], p[m], f[0], f[1]);
        mma(mixture[m][2 * n + 1], p[m], f[2], f[3]);
      }
    }
  }
}

// One piece of a cache and up to 16 M heads: maximum, sum and mixture of the piece alone.
template <int M>
__global__ void __launch_bounds__(kThreads, M == 1 ? 2 : 1) attend_piece(const Decode a, const Caches caches) {
  extern __shared__ __align__(16) bf16 memory[];
  const Layout<M> tiles{memory};
  const int groups = static_cast<int>((a.heads + 16 * M - 1) / (16 * M)), first_head = blockIdx.x % groups * 16 * M;
  const int64_t piece = caches.first_piece[0] + blockIdx.x / groups;
  int n = 0;
  while (caches.first_piece[n + 1] <= piece) ++n;
  const int64_t first = (piece - caches.first_piece[n]) * caches.piece_keys[n];
  const int keys = static_cast<int>(min(int64_t(caches.piece_keys[n]), caches.keys[n] - first));
  const Rows rows{caches.latent[n] + first * caches.stride[n], caches.stride[n], a.width()};
  const Rows queries{a.query + (caches.first + n) * a.heads * a.width(), a.width(), a.width()};
  const auto load = [&](int tile) {
    load_tile<kTileKeys, kMaxLatent>(tiles.latents(tile % 2), rows, tile * kTileKeys, keys, a.whole);
  };
  load_tile<16 * M, kMaxLatent>(tiles.queries(), queries, first_head, a.heads, a.whole);
  load(0);
  float maximum[16 * M / kWarps], sum[16 * M / kWarps] = {}, mixture[M][8][4] = {};
#pragma unroll
  for (float& m : maximum) m = -INFINITY;
  const int count = (keys + kTileKeys - 1) / kTileKeys, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int tile = 0; tile < count; ++tile) {
    wait_for_copies();
    __syncthreads();  // all have this tile, and are done with the one that the next overwrites
    if (tile + 1 < count) load(tile + 1);
    const bf16* latents = tiles.latents(tile % 2);
    take_logits<M>(tiles, latents, a.width(), keys - tile * kTileKeys);
    __syncthreads();
    soften<M>(tiles, maximum, sum);
    __syncthreads();
    if (warp * 64 < a.rank) mix<M>(tiles, latents, mixture);
  }
#pragma unroll
  for (int i = 0; i < 16 * M / kWarps; ++i) {
    const int head = first_head + i * kWarps + warp;
    if (lane > 0 || head >= a.heads) continue;
    a.maximum[piece * a.heads + head] = maximum[i];
    a.sum[piece * a.heads + head] = sum[i];
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n8 = 0; n8 < 8; ++n8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = first_head + m * 16 + lane / 4 + e / 2 * 8, c = warp * 64 + n8 * 8 + lane % 4 * 2 + e % 2;
        if (head < a.heads && c < a.rank) a.mixture[(piece * a.heads + head) * a.rank + c] = mixture[m][n8][e];
      }
    }
  }
}

// One sequence, one head, 32 columns: a warp adds every kWarps-th piece, then the warps' sums are added in order.
__global__ void __launch_bounds__(kThreads) merge(const Decode a, const Caches caches) {
  __shared__ float parts[kWarps][32];
  const int blocks = (a.rank + 31) / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int c = blockIdx.x % blocks * 32 + lane;
  const int64_t h = blockIdx.x / blocks % a.heads, n = blockIdx.x / blocks / a.heads;
  const int64_t begin = caches.first_piece[n], end = caches.first_piece[n + 1];
  float top = -INFINITY, total = 0, part = 0;
  for (int64_t p = begin + lane; p < end; p += 32) top = fmaxf(top, a.maximum[p * a.heads + h]);
  top = warp_max(top);
  for (int64_t p = begin + lane; p < end; p += 32) {
    total += a.sum[p * a.heads + h] * exp2_fast(a.maximum[p * a.heads + h] - top);
  }
  total = warp_sum(total);
  if (c < a.rank) {
#pragma unroll 4
    for (int64_t p = begin + warp; p < end; p += kWarps) {
      part += a.mixture[(p * a.heads + h) * a.rank + c] * exp2_fast(a.maximum[p * a.heads + h] - top);
    }
  }
  parts[warp][lane] = part;
  __syncthreads();
  if (warp > 0 || c >= a.rank) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += parts[w][lane];
  a.merged[((caches.first + n) * a.heads + h) * a.rank + c] = sum / total;
}

// A warp has kRows rows of UV_h in registers and goes through kTogether sequences.
__global__ void __launch_bounds__(kThreads) project(const Decode a) {
  constexpr int kRows = 4, kPieces = kMaxRank / 256;
  const int blocks = (a.value_dim + kRows * kWarps - 1) / (kRows * kWarps), lane = threadIdx.x % 32;
  const int v0 = (blockIdx.x % blocks * kWarps + threadIdx.x / 32) * kRows;
  const int64_t h = blockIdx.x / blocks % a.heads, n0 = blockIdx.x / blocks / a.heads * kTogether;
  const auto load = [&](const auto* row, float(&x)[kPieces][8]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int c = i * 256 + lane * 8;
      load8(row + c, a.rank - c, a.whole, x[i]);
    }
  };
  float w[kRows][kPieces][8] = {};
#pragma unroll
  for (int v = 0; v < kRows; ++v) {
    if (v0 + v < a.value_dim) load(a.up_values(h) + int64_t(v0 + v) * a.rank, w[v]);
  }
  for (int64_t n = n0; n < min(n0 + kTogether, a.sequences); ++n) {
    float x[kPieces][8];
    load(a.merged + (n * a.heads + h) * a.rank, x);
#pragma unroll
    for (int v = 0; v < kRows; ++v) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < kPieces * 8; ++i) dot += w[v][i / 8][i % 8] * x[i / 8][i % 8];
      dot = warp_sum(dot);
      if (lane == 0 && v0 + v < a.value_dim) {
        a.o[(n * a.heads + h) * a.value_dim + v0 + v] = from_float<bf16>(dot);
      }
    }
  }
}

Decode decode_arguments(const Dims& d, const DecodeInputs& in, const View& o, const DecodeWorkspace& w) {
  Decode a{.sequences = d.tokens,
           .heads = d.heads,
           .nope_dim = static_cast<int>(d.nope_dim),
           .rope_dim = static_cast<int>(d.rope_dim),
           .value_dim = static_cast<int>(d.value_dim),
           .rank = static_cast<int>(in.kv_b.dim(1)),
           .scale_log2 = static_cast<float>(d.logit_scale()) * kLog2e,
           .whole = eights(in.kv_b) && d.rope_dim % 8 == 0,
           .q = in.q.gpu<bf16>(),
           .kv_b = in.kv_b.gpu<bf16>(),
           .query = w.query.gpu<bf16>(),
           .maximum = w.maximum.gpu<float>(),
           .sum = w.sum.gpu<float>(),
           .mixture = w.mixture.gpu<float>(),
           .merged = w.merged.gpu<float>(),
           .o = o.gpu<bf16>()};
  for (const View& latent : in.latent) {
    a.whole = a.whole && latent.row_stride() % 8 == 0 && reinterpret_cast<uintptr_t>(latent.data()) % 16 == 0;
  }
  return a;
}

// The sequences from `first` on, at most kBatch; the first piece of them is `first_piece`.
Caches batch_of(const DecodeInputs& in, int64_t first, int64_t first_piece) {
  Caches caches{};
  caches.first = first;
  caches.count = static_cast<int>(std::min<int64_t>(kBatch, static_cast<int64_t>(in.latent.size()) - first));
  caches.first_piece[0] = first_piece;
  for (int n = 0; n < caches.count; ++n) {
    const View& latent = in.latent[static_cast<size_t>(first + n)];
    caches.latent[n] = latent.gpu<bf16>();
    caches.stride[n] = latent.row_stride();
    caches.keys[n] = static_cast<int>(latent.rows());
    caches.piece_keys[n] = static_cast<int>(piece_keys(latent.rows()));
    caches.first_piece[n + 1] = caches.first_piece[n] + ceil_div(latent.rows(), piece_keys(latent.rows()));
  }
  return caches;
}

}  // namespace

void decode(GpuStream stream, const Dims& d, const DecodeInputs& in, const View& o, const DecodeWorkspace& w) {
  const Decode a = decode_arguments(d, in, o, w);
  const int64_t rounds = ceil_div(d.tokens, kTogether) * d.heads;
  launch(absorb, rounds * ceil_div(a.rank + d.rope_dim, 128), 128, 0, stream)(a);
  for (int64_t first = 0, piece = 0; first < d.tokens; first += kBatch) {
    const Caches caches = batch_of(in, first, piece);
    const int64_t pieces = caches.first_piece[caches.count] - piece;
    const auto attend = [&]<int M>() {
      launch(attend_piece<M>, pieces * ceil_div(d.heads, 16 * M), kThreads, Layout<M>::kBytes, stream)(a, caches);
    };
    if (d.heads <= 16) {
      attend.template operator()<1>();
    } else if (d.heads <= 32) {
      attend.template operator()<2>();
    } else {
      attend.template operator()<4>();
    }
    launch(merge, caches.count * d.heads * ceil_div(a.rank, 32), kThreads, 0, stream)(a, caches);
    piece += pieces;
  }
  launch(project, rounds * ceil_div(d.value_dim, 32), kThreads, 0, stream)(a);
}

}  // namespace tessera::ops::mla::cuda
