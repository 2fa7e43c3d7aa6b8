#pragma once

#include "ops/mla/op.h"

namespace tessera::ops::mla::cuda {

inline constexpr int64_t kMaxKeyDim = 192, kMaxValueDim = 128;  // d_n + d_p, d_v: tiles in shared memory
inline constexpr int64_t kMaxRank = 512, kMaxLatent = 576;      // r, r + d_p of decode

struct BackwardWorkspace {
  View delta;            // (T, H) f32: <do, o>
  View dk_shared_parts;  // (Tk, H, d_p) f32: each head's part, added in head order
  // Of the kernel for sm_90 alone, which takes some of the heads at a time. M: tiles of queries in a head.
  View terms = {};       // (H, M, 2, tile) f32: lse log2(e) and delta of each query
  View query_sums = {};  // (some heads, M, tile, d_n + d_p) f32: dq / scale
  View turns = {};       // (1 + some heads * M) i32: the next block; how many have added to a tile of query_sums
};
inline constexpr int64_t kQueryTile = 64;
inline bool has_sm90_kernels(const Dims& d) { return d.nope_dim == 128 && d.rope_dim == 64 && d.value_dim == 128; }

// Pieces of the caches are numbered sequence by sequence.
struct DecodeWorkspace {
  View query;    // (N, H, r + d_p): queries in the latent space, times scale log2(e)
  View maximum;  // (pieces, H) f32: of the scaled logits, times log2(e)
  View sum;      // (pieces, H) f32
  View mixture;  // (pieces, H, r) f32: sum of exp(logit - maximum) latent
  View merged;   // (N, H, r) f32
};

// Keys of a piece of a cache: at least 256, so that what a piece leaves is small beside the latents it reads, and then
// such that one long sequence gives every multiprocessor (132) a piece.
inline constexpr int64_t kPieceTile = 32;
inline int64_t piece_keys(int64_t keys) {
  const int64_t tiles = (keys + kPieceTile - 1) / kPieceTile;
  return kPieceTile * std::max<int64_t>(8, (tiles + 131) / 132);
}

BackwardWorkspace allocate_backward(Arena&, const Dims&, int64_t key_tokens, int64_t documents);
DecodeWorkspace allocate_decode(Arena&, const Dims&, const DecodeInputs&);

void check_dims(const Dims&, DType);                       // UserError for heads wider than the tiles
void check_decode_dims(const Dims&, int64_t rank, DType);  // the same for latents

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Saved&, const OutputGrads&, const Grads&,
              const BackwardWorkspace&);
void decode(GpuStream, const Dims&, const DecodeInputs&, const View& o, const DecodeWorkspace&);

}  // namespace tessera::ops::mla::cuda
