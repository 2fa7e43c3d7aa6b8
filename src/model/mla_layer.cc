#include "model/mla_layer.h"

#include <algorithm>

#include "model/mla_context.h"
#include "ops/sigmoid_gate/op.h"

namespace tessera::model::mla_layer {
namespace {

ops::mla::Dims mla_dims(const LayerContext& lc) {
  const auto& m = lc.config.mla;
  return {lc.tokens, m.heads, m.nope_dim, m.rope_dim, m.value_dim};
}
ops::rms_norm::Dims norm_dims(const LayerContext& lc, int64_t width) {
  return {lc.tokens, width, lc.config.mla.latent_norm_eps};
}
int64_t out_width(const LayerContext& lc) { return lc.config.mla.heads * lc.config.mla.value_dim; }

View q_heads(const LayerContext& lc, const View& q) {
  const auto& m = lc.config.mla;
  return q.reshaped({lc.tokens, m.heads, m.nope_dim + m.rope_dim});
}
View kv_heads(const LayerContext& lc, const View& kv) {
  const auto& m = lc.config.mla;
  return kv.reshaped({kv.dim(0), m.heads, m.nope_dim + m.value_dim});
}
View o_heads(const LayerContext& lc, const View& o) {
  return o.reshaped({lc.tokens, lc.config.mla.heads, lc.config.mla.value_dim});
}
View latent_part(const LayerContext& lc, const View& kv_in) { return kv_in.column_range(0, lc.config.mla.kv_rank); }
View shared_key(const LayerContext& lc, const View& kv_in) {
  return kv_in.column_range(lc.config.mla.kv_rank, lc.config.mla.rope_dim);
}
// Normalised latents of the key rows.
View key_latents(const LayerContext& lc, const Saved& s) { return s.keys.present() ? latent_part(lc, s.keys) : s.c; }
ops::mla::Inputs attention_inputs(const LayerContext& lc, const Saved& s) {
  return {q_heads(lc, s.q), kv_heads(lc, s.kv), shared_key(lc, s.keys.present() ? s.keys : s.kv_in), lc.documents,
          key_documents(lc)};
}
// Of the projection that makes keys and values of latents.
ops::linear::Dims expansion_dims(const LayerContext& lc, const MlaParams& p, int64_t rows) {
  const Shape& shape = lc.weights[p.kv_b].shape();
  return {rows, shape[1], shape[0]};
}

void gather_own_keys(const LayerContext& lc, const Saved& s) {
  Arena::Scope scope(lc.ctx.arena);
  const View own = lc.allocate(s.kv_in.shape());
  copy(s.c, latent_part(lc, own));
  copy(shared_key(lc, s.kv_in), shared_key(lc, own));
  gather_keys(lc, own, s.keys);
}

// Appends this call's latents to the caches of their sequences.
void append(const LayerContext& lc, const Saved& s, Cache& cache) {
  const int64_t rank = lc.config.mla.kv_rank, shared = lc.config.mla.rope_dim;
  for (int64_t n = 0; n < lc.documents.count(); ++n) {
    const View& latent = cache.latent[static_cast<size_t>(n)];
    int64_t& length = cache.length[static_cast<size_t>(n)];
    const int64_t added = lc.documents.length(n);
    TESSERA_CHECK(length + added <= latent.rows(), "latent cache of {} rows, {} used, {} more", latent.rows(), length,
                  added);
    const View rows = latent.row_range(length, added);
    copy(s.c.row_range(lc.documents.begin(n), added), rows.column_range(0, rank));
    copy(shared_key(lc, s.kv_in).row_range(lc.documents.begin(n), added), rows.column_range(rank, shared));
    length += added;
  }
}

void decode(const LayerContext& lc, const MlaParams& p, const Saved& s, const Cache& cache) {
  ops::mla::DecodeInputs in{q_heads(lc, s.q), lc.weights[p.kv_b], {}};
  for (size_t n = 0; n < cache.latent.size(); ++n) in.latent.push_back(cache.latent[n].row_range(0, cache.length[n]));
  ops::mla::decode(lc.ctx, mla_dims(lc), in, o_heads(lc, s.o));
}

}  // namespace

Cache allocate_cache(Arena& arena, const ModelConfig& c, int64_t sequences, int64_t capacity, DType dtype) {
  Cache cache;
  for (int64_t n = 0; n < sequences; ++n) {
    cache.latent.push_back(arena.allocate(dtype, {capacity, c.mla.kv_rank + c.mla.rope_dim}));
    cache.length.push_back(0);
  }
  return cache;
}

Saved allocate_dear(const LayerContext& lc) {
  const auto& m = lc.config.mla;
  Saved s;
  if (m.q_rank > 0) s.q_latent_in = lc.allocate({lc.tokens, m.q_rank});
  s.q = lc.allocate({lc.tokens, m.heads * (m.nope_dim + m.rope_dim)});
  s.kv_in = lc.allocate({lc.tokens, m.kv_rank + m.rope_dim});
  if (lc.shard != nullptr) s.keys = lc.allocate({key_rows(lc), m.kv_rank + m.rope_dim});
  s.kv = lc.allocate({key_rows(lc), m.heads * (m.nope_dim + m.value_dim)});
  s.attention = ops::mla::allocate_saved(lc.ctx, mla_dims(lc), lc.dtype);
  s.o = lc.allocate({lc.tokens, out_width(lc)});
  if (m.output_gate) s.gate = lc.allocate({lc.tokens, out_width(lc)});
  return s;
}

void allocate_cheap(const LayerContext& lc, Saved& s) {
  const auto& m = lc.config.mla;
  s.c = lc.allocate({lc.tokens, m.kv_rank});
  s.c_norm = ops::rms_norm::allocate_saved(lc.ctx, norm_dims(lc, m.kv_rank), lc.dtype);
  if (m.q_rank == 0) return;
  s.q_latent = lc.allocate({lc.tokens, m.q_rank});
  s.q_norm = ops::rms_norm::allocate_saved(lc.ctx, norm_dims(lc, m.q_rank), lc.dtype);
}

void make_cheap(const LayerContext& lc, const MlaParams& p, Saved& s) {
  const auto& m = lc.config.mla;
  ops::rms_norm::forward(lc.ctx, norm_dims(lc, m.kv_rank), {latent_part(lc, s.kv_in), lc.weights[p.kv_a_norm]}, {s.c},
                         &s.c_norm);
  if (m.q_rank == 0) return;
  ops::rms_norm::forward(lc.ctx, norm_dims(lc, m.q_rank), {s.q_latent_in, lc.weights[p.q_a_norm]}, {s.q_latent},
                         &s.q_norm);
}

void forward(const LayerContext& lc, const MlaParams& p, const View& x, const View& y, Saved& s, const View& max_logit,
             Cache* cache) {
  const auto& m = lc.config.mla;
  project(lc, x, p.kv_a, s.kv_in);
  if (m.q_rank > 0) project(lc, x, p.q_a, s.q_latent_in);
  make_cheap(lc, p, s);
  if (m.q_rank > 0) {
    project(lc, s.q_latent, p.q_b, s.q);
  } else {
    project(lc, x, p.q_proj, s.q);
  }
  const bool first_call = cache == nullptr || std::ranges::all_of(cache->length, [](int64_t n) { return n == 0; });
  if (cache != nullptr) append(lc, s, *cache);
  if (first_call) {
    if (s.keys.present()) gather_own_keys(lc, s);
    ops::linear::forward(lc.ctx, expansion_dims(lc, p, s.kv.dim(0)), {key_latents(lc, s), lc.weights[p.kv_b]}, {s.kv});
    Arena::Scope scope(lc.ctx.arena);
    ops::mla::forward(lc.ctx, mla_dims(lc), attention_inputs(lc, s), {o_heads(lc, s.o), max_logit}, &s.attention);
  } else {
    TESSERA_CHECK(lc.tokens == lc.documents.count(), "{} tokens for {} sequences: decode takes one token each",
                  lc.tokens, lc.documents.count());
    decode(lc, p, s, *cache);
  }
  if (!m.output_gate) return project(lc, s.o, p.o_proj, y);
  project(lc, x, p.g_proj, s.gate);
  Arena::Scope scope(lc.ctx.arena);
  const View h = lc.allocate({lc.tokens, out_width(lc)});
  ops::sigmoid_gate::forward(lc.ctx, {lc.tokens, out_width(lc)}, {s.o, s.gate}, {h});
  project(lc, h, p.o_proj, y);
}

void backward(const LayerContext& lc, const MlaParams& p, const View& x, const Saved& s, const View& dy,
              const View& dx) {
  const auto& m = lc.config.mla;
  Arena::Scope scope(lc.ctx.arena);
  const Shape out{lc.tokens, out_width(lc)};
  const View d_o = lc.allocate(out);
  Into into = Into::overwrite;  // of dx: the first contribution overwrites
  if (m.output_gate) {
    Arena::Scope inner_scope(lc.ctx.arena);
    const View h = lc.allocate(out), dgate = lc.allocate(out);
    ops::sigmoid_gate::forward(lc.ctx, {lc.tokens, out_width(lc)}, {s.o, s.gate}, {h});
    project_backward(lc, h, p.o_proj, dy, d_o, Into::overwrite);
    ops::sigmoid_gate::backward(lc.ctx, {lc.tokens, out_width(lc)}, {s.o, s.gate}, {d_o}, {d_o, dgate});
    project_backward(lc, x, p.g_proj, dgate, dx, Into::overwrite);
    into = Into::add;
  } else {
    project_backward(lc, s.o, p.o_proj, dy, d_o, Into::overwrite);
  }

  const View dq = lc.allocate(s.q.shape()), dkv = lc.allocate(s.kv.shape()), dkv_in = lc.allocate(s.kv_in.shape());
  const View dkeys = s.keys.present() ? lc.allocate(s.keys.shape()) : dkv_in;
  ops::mla::backward(lc.ctx, mla_dims(lc), attention_inputs(lc, s), {o_heads(lc, s.o), View()}, s.attention,
                     {o_heads(lc, d_o)}, {q_heads(lc, dq), kv_heads(lc, dkv), shared_key(lc, dkeys)});

  const View dc = latent_part(lc, dkv_in);
  ops::linear::backward(lc.ctx, expansion_dims(lc, p, dkv.dim(0)), {key_latents(lc, s), lc.weights[p.kv_b]}, {dkv},
                        {latent_part(lc, dkeys), false, lc.weights.d(p.kv_b)});
  if (s.keys.present()) return_key_gradients(lc, dkeys, dkv_in);
  ops::rms_norm::backward(lc.ctx, norm_dims(lc, m.kv_rank), {latent_part(lc, s.kv_in), lc.weights[p.kv_a_norm]},
                          s.c_norm, {dc}, {dc, lc.weights.d(p.kv_a_norm)});
  project_backward(lc, x, p.kv_a, dkv_in, dx, into);
  if (m.q_rank == 0) return project_backward(lc, x, p.q_proj, dq, dx, Into::add);
  const View dlatent = lc.allocate({lc.tokens, m.q_rank});
  project_backward(lc, s.q_latent, p.q_b, dq, dlatent, Into::overwrite);
  ops::rms_norm::backward(lc.ctx, norm_dims(lc, m.q_rank), {s.q_latent_in, lc.weights[p.q_a_norm]}, s.q_norm, {dlatent},
                          {dlatent, lc.weights.d(p.q_a_norm)});
  project_backward(lc, x, p.q_a, dlatent, dx, Into::add);
}

}  // namespace tessera::model::mla_layer
