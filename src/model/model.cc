#include "model/model.h"

#include <algorithm>

#include "model/tensor_shard.h"
#include "ops/cross_entropy/op.h"
#include "ops/elementwise/op.h"
#include "ops/embedding/op.h"

namespace tessera::model {

// What the backward of a sublayer needs beside the residual stream: first its layer's dear part, from `cheap` on what
// can be made again from that.
struct Model::SublayerSaved {
  int64_t cheap = 0;  // mark of the arena
  View h;             // (T, D) mixed input; absent where the sublayer reads P itself
  ops::attn_res::Saved mix;
  ops::rms_norm::Saved norm;
  View x;                // (T, D) normalised input
  kda_layer::Saved kda;  // one of these four
  mla_layer::Saved mla;
  mlp::Saved dense;
  latent_moe::Saved moe;
};

namespace {

bool is_mixer(int64_t s) { return s % 2 == 0; }
int64_t layer_of(int64_t s) { return s / 2; }

ops::rms_norm::Dims norm_dims(const LayerContext& lc) { return {lc.tokens, lc.config.width, lc.config.norm_eps}; }

Shard shard_of(const ModelConfig& c, const dist::Mesh* mesh) {
  if (mesh == nullptr) return {};
  const dist::ExpertRanges ranges{c.moe.experts, mesh->expert.size()};
  return {ranges.begin(mesh->expert.rank()), ranges.count(mesh->expert.rank()), mesh->tensor.rank(),
          mesh->tensor.size()};
}

// In the account of memory.
const char* kind_of(const ModelConfig& c, int64_t s) {
  if (is_mixer(s)) return c.is_mla(layer_of(s)) ? "MLA" : "KDA";
  return c.is_moe(layer_of(s)) ? "MoE" : "dense FFN";
}

}  // namespace

Model::Model(ModelConfig config, ModelOptions options)
    : config_(std::move(config)),
      options_(std::move(options)),
      share_(share_of(config_, options_.mesh != nullptr ? options_.mesh->tensor.size() : 1)),
      table_(config_, shard_of(config_, options_.mesh)) {
  options_.recompute.resize(static_cast<size_t>(config_.layers), Recompute::none);
}

LayerContext Model::layer_context(Context& ctx, const Weights& w, const Batch& batch) const {
  return {.ctx = ctx,
          .config = share_,
          .weights = w,
          .documents = batch.documents,
          .tokens = batch.ids.elements(),
          .dtype = w.value.front().dtype(),
          .mesh = options_.mesh,
          .expert_imbalance = options_.expert_imbalance,
          .shard = batch.shard.get()};
}

int64_t Model::moe_layers() const {
  int64_t n = 0;
  for (int64_t l = 0; l < config_.layers; ++l) n += config_.is_moe(l);
  return n;
}

int64_t Model::mla_layers() const {
  int64_t n = 0;
  for (int64_t l = 0; l < config_.layers; ++l) n += config_.is_mla(l);
  return n;
}

StepRecord Model::allocate_record(Arena& arena, DType dtype, const RecordOptions& options) const {
  StepRecord record;
  Arena::Label label(arena, "counters");
  for (int64_t l = 0; l < moe_layers(); ++l) {
    record.routers.push_back(options.router);
    record.counters.push_back(
        ops::router::allocate_counters(arena, config_.moe.experts, options.router.balance, options.counters));
  }
  for (int64_t l = 0; options.max_logit && l < mla_layers(); ++l) {
    record.max_logit.push_back(arena.allocate_zeroed(exact_type(dtype), {share_.mla.heads}));
  }
  return record;
}

// ---- the residual stream ----

bool Model::starts_block(int64_t s) const {
  return config_.attention_residuals() && s % config_.sublayers_per_block() == 0;
}

std::vector<View> Model::sources(const Residuals& residuals, int64_t s) const {
  std::vector<View> found;
  for (int64_t b = 0; config_.attention_residuals() && b < s; b += config_.sublayers_per_block()) {
    found.push_back(residuals[static_cast<size_t>(b)]);
  }
  found.push_back(residuals[static_cast<size_t>(s)]);
  return found;
}

static MixParams mix_params(const ParameterTable& table, int64_t s, int64_t sublayers) {
  if (s == sublayers) return table.output_mix;
  const LayerParams& p = table.layer(layer_of(s));
  return is_mixer(s) ? p.attention_mix : p.ffn_mix;
}

const View& Model::mix(const LayerContext& lc, const Residuals& residuals, int64_t s, SublayerSaved& saved) const {
  const std::vector<View> from = sources(residuals, s);
  if (from.size() == 1) return residuals[static_cast<size_t>(s)];
  const ops::attn_res::Dims dims{lc.tokens, config_.width, static_cast<int64_t>(from.size()), config_.norm_eps};
  const MixParams p = mix_params(table_, s, sublayers());
  saved.h = lc.allocate({lc.tokens, config_.width});
  saved.mix = ops::attn_res::allocate_saved(lc.ctx, dims, lc.dtype);
  ops::attn_res::forward(lc.ctx, dims, {from, lc.weights[p.query].reshaped({config_.width}), lc.weights[p.gain]},
                         {saved.h}, &saved.mix);
  return saved.h;
}

// Adds the gradient of what sublayer s read to the gradients of its sources.
void Model::mix_backward(const LayerContext& lc, const Residuals& residuals, int64_t s, const SublayerSaved& saved,
                         const View& dh, const Residuals& gradients) const {
  const std::vector<View> from = sources(residuals, s);
  const std::vector<View> to = sources(gradients, s);
  if (from.size() == 1) return ops::elementwise::add_to(lc.ctx, dh, to.front());
  const ops::attn_res::Dims dims{lc.tokens, config_.width, static_cast<int64_t>(from.size()), config_.norm_eps};
  const MixParams p = mix_params(table_, s, sublayers());
  const Shape row{config_.width};
  ops::attn_res::backward(lc.ctx, dims, {from, lc.weights[p.query].reshaped(row), lc.weights[p.gain]}, {saved.h},
                          saved.mix, {dh}, {to, lc.weights.d(p.query).reshaped(row), lc.weights.d(p.gain)});
}

// ---- one sublayer ----

static int64_t count_before(const ModelConfig& c, int64_t layer, bool mla) {
  int64_t n = 0;
  for (int64_t l = 0; l < layer; ++l) n += c.is_mla(l) == mla;
  return n;
}

// Of an MoE layer among the MoE layers.
static size_t moe_index(const ModelConfig& c, int64_t layer) { return static_cast<size_t>(layer - c.ffn.dense_layers); }

bool Model::in_blocks(const LayerContext& lc, int64_t s) const {
  return !is_mixer(s) && options_.ffn_block_tokens > 0 && lc.tokens > options_.ffn_block_tokens;
}

template <class F>
void Model::for_blocks(const LayerContext& lc, F&& of_block) const {
  for (int64_t begin = 0; begin < lc.tokens; begin += options_.ffn_block_tokens) {
    Arena::Scope scope(lc.ctx.arena);
    LayerContext block = lc;
    block.tokens = std::min(options_.ffn_block_tokens, lc.tokens - begin);
    of_block(block, begin);
  }
}

static std::vector<View> rows_of(const std::vector<View>& streams, int64_t begin, int64_t count) {
  std::vector<View> rows;
  for (const View& stream : streams) rows.push_back(stream.row_range(begin, count));
  return rows;
}

// What sublayer s works on: the normalised mix.
void Model::read(const LayerContext& lc, const Residuals& residuals, int64_t s, SublayerSaved& saved) const {
  const LayerParams& p = table_.layer(layer_of(s));
  const View& h = mix(lc, residuals, s, saved);
  saved.x = lc.allocate({lc.tokens, config_.width});
  saved.norm = ops::rms_norm::allocate_saved(lc.ctx, norm_dims(lc), lc.dtype);
  ops::rms_norm::forward(lc.ctx, norm_dims(lc), {h, lc.weights[is_mixer(s) ? p.attention_norm : p.ffn_norm]}, {saved.x},
                         &saved.norm);
}

// residuals[s] -> residuals[s + 1]
void Model::sublayer(const LayerContext& lc, const Residuals& residuals, int64_t s, SublayerSaved& saved, bool training,
                     StepRecord* record, Caches* caches) const {
  if (in_blocks(lc, s)) {
    return for_blocks(lc, [&](const LayerContext& block, int64_t begin) {
      SublayerSaved of_block;
      sublayer(block, rows_of(residuals, begin, block.tokens), s, of_block, training, record, caches);
    });
  }
  Arena& arena = lc.ctx.arena;
  Arena::Label label(arena, kind_of(config_, s));
  const int64_t layer = layer_of(s);
  const LayerParams& p = table_.layer(layer);
  const View& out = residuals[static_cast<size_t>(s) + 1];
  if (is_mixer(s) && config_.is_mla(layer)) {
    const size_t index = static_cast<size_t>(count_before(config_, layer, true));
    const bool want_max = record != nullptr && !record->max_logit.empty();
    saved.mla = mla_layer::allocate_dear(lc);
    saved.cheap = arena.used();
    read(lc, residuals, s, saved);
    mla_layer::allocate_cheap(lc, saved.mla);
    mla_layer::forward(lc, p.mla, saved.x, out, saved.mla, want_max ? record->max_logit[index] : View(),
                       caches != nullptr ? &caches->mla[index] : nullptr);
  } else if (is_mixer(s)) {
    const size_t index = static_cast<size_t>(count_before(config_, layer, false));
    saved.kda = kda_layer::allocate_dear(lc, training);
    saved.cheap = arena.used();
    read(lc, residuals, s, saved);
    kda_layer::allocate_cheap(lc, saved.kda);
    kda_layer::forward(lc, p.kda, saved.x, out, saved.kda, training, caches != nullptr ? &caches->kda[index] : nullptr);
  } else if (config_.is_moe(layer)) {
    saved.moe = latent_moe::allocate_dear(lc, p.moe);
    saved.cheap = arena.used();
    read(lc, residuals, s, saved);
    latent_moe::allocate_cheap(lc, p.moe, saved.moe);
    const size_t index = moe_index(config_, layer);
    if (record != nullptr) {
      const latent_moe::Counting counting{record->routers[index].balance, record->counters[index]};
      latent_moe::forward(lc, p.moe, saved.x, out, saved.moe, &counting);
    } else {
      latent_moe::forward(lc, p.moe, saved.x, out, saved.moe, nullptr);
    }
  } else {
    saved.dense = mlp::allocate_dear(lc, p.dense);
    saved.cheap = arena.used();
    read(lc, residuals, s, saved);
    mlp::forward(lc, p.dense, saved.x, out, saved.dense);
  }
  if (is_mixer(s)) sum_outputs(lc, out);
  if (!starts_block(s)) ops::elementwise::add_to(lc.ctx, residuals[static_cast<size_t>(s)], out);
}

// What forward dropped from saved.cheap on.
void Model::make_cheap(const LayerContext& lc, const Residuals& residuals, int64_t s, SublayerSaved& saved) const {
  Arena::Label label(lc.ctx.arena, kind_of(config_, s));
  const int64_t layer = layer_of(s);
  const LayerParams& p = table_.layer(layer);
  read(lc, residuals, s, saved);
  if (is_mixer(s) && config_.is_mla(layer)) {
    mla_layer::allocate_cheap(lc, saved.mla);
    mla_layer::make_cheap(lc, p.mla, saved.mla);
  } else if (is_mixer(s)) {
    kda_layer::allocate_cheap(lc, saved.kda);
    kda_layer::make_cheap(lc, p.kda, saved.kda, nullptr);
  } else if (config_.is_moe(layer)) {
    latent_moe::allocate_cheap(lc, p.moe, saved.moe);
    latent_moe::make_cheap(lc, p.moe, saved.moe);
  }
}

// gradients[s + 1] -> added to gradients[s] and to those of the blocks
void Model::sublayer_backward(const LayerContext& lc, const Residuals& residuals, int64_t s, const SublayerSaved& saved,
                              const Residuals& gradients, double z_loss) const {
  Arena::Scope scope(lc.ctx.arena);
  Arena::Label label(lc.ctx.arena, kind_of(config_, s));
  const int64_t layer = layer_of(s);
  const LayerParams& p = table_.layer(layer);
  const View& dy = gradients[static_cast<size_t>(s) + 1];
  const View dx = lc.allocate({lc.tokens, config_.width});
  if (is_mixer(s) && config_.is_mla(layer)) {
    mla_layer::backward(lc, p.mla, saved.x, saved.mla, dy, dx);
  } else if (is_mixer(s)) {
    kda_layer::backward(lc, p.kda, saved.x, saved.kda, dy, dx);
  } else if (config_.is_moe(layer)) {
    latent_moe::backward(lc, p.moe, saved.x, saved.moe, dy, dx, z_loss);
  } else {
    mlp::backward(lc, p.dense, saved.x, saved.dense, dy, dx, Into::overwrite);
  }
  if (is_mixer(s)) sum_terms(lc, dx);
  const ParamId gain = is_mixer(s) ? p.attention_norm : p.ffn_norm;
  const View& h = saved.h.present() ? saved.h : residuals[static_cast<size_t>(s)];
  ops::rms_norm::backward(lc.ctx, norm_dims(lc), {h, lc.weights[gain]}, saved.norm, {dx}, {dx, lc.weights.d(gain)});
  mix_backward(lc, residuals, s, saved, dx, gradients);
}

// ---- training ----

void Model::forward_backward(Context& ctx, const Weights& w, const Batch& batch, double scale, const View& loss,
                             StepRecord* record) const {
  const int64_t tokens = batch.ids.elements(), last = sublayers();
  const LayerContext lc = layer_context(ctx, w, batch);
  const Shape row{tokens, config_.width};
  Arena::Scope step(ctx.arena);
  Arena::Label label(ctx.arena, "residual stream");

  Residuals residuals{lc.allocate(row)};
  ops::embedding::forward(ctx, {tokens, config_.vocabulary, config_.width}, {batch.ids, w[table_.embedding]},
                          {residuals[0]});
  std::vector<SublayerSaved> saved(static_cast<size_t>(last) + 1);
  for (int64_t s = 0; s < last; ++s) {
    residuals.push_back(lc.allocate(row));
    const int64_t all = ctx.arena.used();
    SublayerSaved& of_s = saved[static_cast<size_t>(s)];
    sublayer(lc, residuals, s, of_s, true, record, nullptr);
    if (in_blocks(lc, s) || recompute_of(s) == Recompute::none) continue;
    ctx.arena.release_to(recompute_of(s) == Recompute::full ? all : of_s.cheap);
  }

  // Gradients of the stream. Inside a block they run through one buffer; a closed block has its own, since later
  // sublayers add to it directly.
  Arena::Label of_gradients(ctx.arena, "gradients of the residual stream");
  Residuals gradients(residuals.size());
  gradients.back() = ctx.arena.allocate_zeroed(lc.dtype, row);
  for (int64_t s = last - 1; s >= 0; --s) {
    const size_t i = static_cast<size_t>(s);
    gradients[i] = starts_block(s) ? ctx.arena.allocate_zeroed(lc.dtype, row) : gradients[i + 1];
  }

  {
    Arena::Scope head(ctx.arena);
    Arena::Label of_head(ctx.arena, "loss");
    SublayerSaved& end = saved.back();
    const View& h = mix(lc, residuals, last, end);
    end.x = lc.allocate(row);
    end.norm = ops::rms_norm::allocate_saved(ctx, norm_dims(lc), lc.dtype);
    ops::rms_norm::forward(ctx, norm_dims(lc), {h, w[table_.final_norm]}, {end.x}, &end.norm);
    const View dx = lc.allocate(row);
    ops::cross_entropy::forward_backward(ctx, {tokens, config_.width, config_.vocabulary, options_.loss_block_rows},
                                         {end.x, w[table_.head], batch.targets}, scale, {loss}, {dx, w.d(table_.head)});
    ops::rms_norm::backward(ctx, norm_dims(lc), {h, w[table_.final_norm]}, end.norm, {dx},
                            {dx, w.d(table_.final_norm)});
    mix_backward(lc, residuals, last, end, dx, gradients);
  }

  LayerContext again = lc;  // forward once more: nobody reads residuals[s + 1] after the backward of sublayer s + 1
  again.output_wanted = false;
  for (int64_t s = last - 1; s >= 0; --s) {
    Arena::Scope recomputed(ctx.arena);
    SublayerSaved& of_s = saved[static_cast<size_t>(s)];
    const int64_t layer = layer_of(s);
    const bool has_router = record != nullptr && !is_mixer(s) && config_.is_moe(layer);
    const double z_loss = has_router ? scale * record->routers[moe_index(config_, layer)].z_loss : 0;
    if (in_blocks(lc, s)) {
      for_blocks(again, [&](const LayerContext& block, int64_t begin) {
        const Residuals rows = rows_of(residuals, begin, block.tokens);
        SublayerSaved of_block;
        sublayer(block, rows, s, of_block, true, nullptr, nullptr);
        sublayer_backward(block, rows, s, of_block, rows_of(gradients, begin, block.tokens), z_loss);
      });
      continue;
    }
    if (recompute_of(s) == Recompute::full) {
      sublayer(again, residuals, s, of_s, true, nullptr, nullptr);
    } else if (recompute_of(s) == Recompute::cheap) {
      make_cheap(lc, residuals, s, of_s);
    }
    sublayer_backward(lc, residuals, s, of_s, gradients, z_loss);
  }
  ops::embedding::backward(ctx, {tokens, config_.vocabulary, config_.width}, {batch.ids, w[table_.embedding]},
                           {gradients.front()}, {w.d(table_.embedding)});
}

// ---- evaluation and inference ----

// Writes the normalised rows before the head to `out`. Two buffers carry the stream; closed blocks keep their own.
void Model::inference_stream(const LayerContext& lc, const View& ids, StepRecord* record, Caches* caches,
                             const View& out) const {
  Arena::Scope scope(lc.ctx.arena);
  const int64_t last = sublayers();
  const Shape row{lc.tokens, config_.width};
  const View turns[2] = {lc.allocate(row), lc.allocate(row)};
  Residuals residuals;
  for (int64_t s = 0; s <= last; ++s) {
    residuals.push_back(s < last && starts_block(s) ? lc.allocate(row) : turns[s % 2]);
  }
  ops::embedding::forward(lc.ctx, {lc.tokens, config_.vocabulary, config_.width}, {ids, lc.weights[table_.embedding]},
                          {residuals[0]});
  for (int64_t s = 0; s < last; ++s) {
    Arena::Scope one(lc.ctx.arena);
    SublayerSaved saved;
    sublayer(lc, residuals, s, saved, false, record, caches);
  }
  SublayerSaved end;
  const View& h = mix(lc, residuals, last, end);
  ops::rms_norm::forward(lc.ctx, norm_dims(lc), {h, lc.weights[table_.final_norm]}, {out}, nullptr);
}

void Model::evaluate(Context& ctx, const Weights& w, const Batch& batch, const View& loss, StepRecord* record) const {
  const int64_t tokens = batch.ids.elements();
  const LayerContext lc = layer_context(ctx, w, batch);
  Arena::Scope scope(ctx.arena);
  const View x = lc.allocate({tokens, config_.width});
  inference_stream(lc, batch.ids, record, nullptr, x);
  ops::cross_entropy::forward(ctx, {tokens, config_.width, config_.vocabulary, options_.loss_block_rows},
                              {x, w[table_.head], batch.targets}, {loss});
}

Caches Model::allocate_caches(Arena& arena, int64_t sequences, int64_t capacity, DType dtype) const {
  Caches caches;
  for (int64_t l = 0; l < config_.layers; ++l) {
    if (config_.is_mla(l)) {
      caches.mla.push_back(mla_layer::allocate_cache(arena, config_, sequences, capacity, dtype));
    } else {
      caches.kda.push_back(kda_layer::allocate_cache(arena, config_, sequences, dtype));
    }
  }
  return caches;
}

void Model::hidden(Context& ctx, const Weights& w, const View& ids, const Documents& documents, Caches* caches,
                   const View& out) const {
  inference_stream(layer_context(ctx, w, {ids, View(), documents}), ids, nullptr, caches, out);
}

void Model::logits(Context& ctx, const Weights& w, const View& hidden, const View& out) const {
  ops::linear::forward(ctx, {hidden.rows(), config_.width, config_.vocabulary}, {hidden, w[table_.head]}, {out});
}

}  // namespace tessera::model
