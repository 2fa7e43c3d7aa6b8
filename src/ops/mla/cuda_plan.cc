// What the CUDA back end takes from the arena and which shapes it has tiles for: known without a GPU.
#include "ops/mla/cuda.h"

namespace tessera::ops::mla::cuda {

BackwardWorkspace allocate_backward(Arena& arena, const Dims& d, int64_t key_tokens) {
  return {.delta = arena.allocate(DType::f32, {d.tokens, d.heads}),
          .dk_shared_parts = arena.allocate(DType::f32, {key_tokens, d.heads, d.rope_dim})};
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
