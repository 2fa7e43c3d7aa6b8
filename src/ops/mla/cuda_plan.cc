// What the CUDA back end takes from the arena and which shapes it has tiles for: known without a GPU.
#include "ops/mla/cuda.h"

namespace tessera::ops::mla::cuda {
namespace {

// Heads whose dq is summed at a time: groups of a like size, one head or no more than 512 MiB each.
int64_t summed_heads(const Dims& d, int64_t tiles) {
  const int64_t head_bytes = tiles * kQueryTile * d.key_dim() * bytes_of(DType::f32);
  const int64_t most = std::max<int64_t>((int64_t{1} << 29) / head_bytes, 1), groups = (d.heads + most - 1) / most;
  return (d.heads + groups - 1) / groups;
}

}  // namespace

BackwardWorkspace allocate_backward(Arena& arena, const Dims& d, int64_t key_tokens, int64_t documents) {
  BackwardWorkspace w{.delta = arena.allocate(DType::f32, {d.tokens, d.heads}),
                      .dk_shared_parts = arena.allocate(DType::f32, {key_tokens, d.heads, d.rope_dim})};
  if (!has_sm90_kernels(d) || d.tokens == 0 || d.heads == 0) return w;
  const int64_t tiles = d.tokens / kQueryTile + documents, heads = summed_heads(d, tiles);
  w.terms = arena.allocate(DType::f32, {d.heads, tiles, 2, kQueryTile});
  w.query_sums = arena.allocate(DType::f32, {heads, tiles, kQueryTile, d.key_dim()});
  w.turns = arena.allocate(DType::i32, {1 + heads * tiles});
  return w;
}

DecodeWorkspace allocate_decode(Arena& arena, const Dims& d, const DecodeInputs& in) {
  const int64_t rank = in.kv_b.dim(1);
  int64_t pieces = 0;
  for (const View& latent : in.latent) {
    const int64_t keys = piece_keys(latent.rows());
    pieces += (latent.rows() + keys - 1) / keys;
  }
  return {.query = arena.allocate(in.q.dtype(), {d.tokens, d.heads, rank + d.rope_dim}),
          .maximum = arena.allocate(DType::f32, {pieces, d.heads}),
          .sum = arena.allocate(DType::f32, {pieces, d.heads}),
          .mixture = arena.allocate(DType::f32, {pieces, d.heads, rank}),
          .merged = arena.allocate(DType::f32, {d.tokens, d.heads, rank})};
}

void check_dims(const Dims& d, DType dtype) {
  TESSERA_CHECK(dtype == DType::bf16, "mla on the GPU stores bf16, found {}", name_of(dtype));
  if (d.key_dim() <= kMaxKeyDim && d.value_dim <= kMaxValueDim) return;
  fail_user(
      "attention heads with keys of {} + {} and values of {} elements: on the GPU keys may have {} and values {}; "
      "choose "
      "smaller heads or device = \"cpu\"",
      d.nope_dim, d.rope_dim, d.value_dim, kMaxKeyDim, kMaxValueDim);
}

void check_decode_dims(const Dims& d, int64_t rank, DType dtype) {
  check_dims(d, dtype);
  if (rank <= kMaxRank && rank + d.rope_dim <= kMaxLatent) return;
  fail_user(
      "attention latents of {} + {} elements: on the GPU the latent may have {}, with the shared key {}; choose a "
      "smaller rank or device = \"cpu\"",
      rank, d.rope_dim, kMaxRank, kMaxLatent);
}

}  // namespace tessera::ops::mla::cuda
