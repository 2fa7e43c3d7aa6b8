#include "model/model.h"

#include "model/flight.h"
#include "model/tensor_shard.h"
#include "ops/cross_entropy/op.h"
#include "ops/elementwise/op.h"
#include "ops/embedding/op.h"

namespace tessera::model {

namespace {

Shard shard_of(const ModelConfig& c, const dist::Mesh* mesh) {
  if (mesh == nullptr) return {.stages = {.layers = c.layers}};
  const dist::ExpertRanges ranges{c.moe.experts, mesh->expert.size()};
  return {ranges.begin(mesh->expert.rank()),
          ranges.count(mesh->expert.rank()),
          {c.layers, mesh->pipeline.size(), mesh->layout.pipeline_chunks},
          mesh->pipeline.rank(),
          mesh->tensor.rank(),
          mesh->tensor.size()};
}

// Of the activations beside them: matrices have it, whatever else is exact.
DType type_of(const Weights& w, const ParameterTable& table) {
  for (ParamId id = 0; id < table.size(); ++id) {
    if (!table[id].exact) return w[id].dtype();
  }
  return w.value.front().dtype();
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
      shard_(shard_of(config_, options_.mesh)),
      table_(config_, shard_) {
  options_.recompute.resize(static_cast<size_t>(config_.layers), Recompute::none);
}

LayerContext Model::layer_context(Context& ctx, const Weights& w, const Batch& batch) const {
  return {.ctx = ctx,
          .config = share_,
          .weights = w,
          .documents = batch.documents,
          .tokens = batch.ids.elements(),
          .dtype = type_of(w, table_),
          .mesh = options_.mesh,
          .expert_imbalance = options_.expert_imbalance,
          .shard = batch.shard.get()};
}

int64_t Model::moe_layers() const {
  int64_t n = 0;
  for (int64_t l = 0; l < config_.layers; ++l) n += has_moe(l);
  return n;
}

int64_t Model::mla_layers() const {
  int64_t n = 0;
  for (int64_t l = 0; l < config_.layers; ++l) n += has_mla(l);
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

// Of a mixer among those of its kind in this process.
static size_t mixer_index(const Model& model, int64_t layer, bool mla) {
  size_t n = 0;
  for (int64_t l = 0; l < layer; ++l) n += model.holds(l) && model.config().is_mla(l) == mla;
  return n;
}

size_t Model::moe_index(int64_t layer) const {
  size_t n = 0;
  for (int64_t l = 0; l < layer; ++l) n += has_moe(l);
  return n;
}

bool Model::in_blocks(const LayerContext& lc, int64_t s) const {
  return !is_mixer(s) && options_.ffn_block_tokens > 0 && lc.tokens > options_.ffn_block_tokens;
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
    const size_t index = mixer_index(*this, layer, true);
    const bool want_max = record != nullptr && !record->max_logit.empty();
    saved.mla = mla_layer::allocate_dear(lc);
    saved.cheap = arena.used();
    read(lc, residuals, s, saved);
    mla_layer::allocate_cheap(lc, saved.mla);
    mla_layer::forward(lc, p.mla, saved.x, out, saved.mla, want_max ? record->max_logit[index] : View(),
                       caches != nullptr ? &caches->mla[index] : nullptr);
  } else if (is_mixer(s)) {
    const size_t index = mixer_index(*this, layer, false);
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
    const size_t index = moe_index(layer);
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

// ---- evaluation and inference ----

// Writes the normalised rows before the head to `out`, where the last chunk is. Two buffers carry the stream; closed
// blocks keep their own.
void Model::inference_stream(const LayerContext& lc, const View& ids, StepRecord* record, Caches* caches,
                             const View& out) const {
  Arena::Scope scope(lc.ctx.arena);
  const int64_t last = sublayers();
  const Shape row{lc.tokens, config_.width};
  const View turns[2] = {lc.allocate(row), lc.allocate(row)};
  Residuals residuals(static_cast<size_t>(last) + 1);
  for (int64_t chunk = shard_.process; chunk < stages().count(); chunk += stages().processes) {
    const int64_t begin = 2 * stages().begin(chunk), end = 2 * stages().end(chunk);
    const auto make = [&](int64_t s) {
      return residuals[static_cast<size_t>(s)] = s < last && starts_block(s) ? lc.allocate(row) : turns[s % 2];
    };
    std::vector<View> from, to;
    for (const int64_t s : entering(chunk)) from.push_back(make(s));
    for (int64_t s = chunk == 0 ? begin : begin + 1; s <= end; ++s) make(s);
    if (chunk == 0) {
      ops::embedding::forward(lc.ctx, {lc.tokens, config_.vocabulary, config_.width},
                              {ids, lc.weights[table_.embedding]}, {residuals[0]});
    } else {
      dist::Communicator& axis = lc.mesh->pipeline;
      axis.send_receive({}, 0, from, (axis.rank() + axis.size() - 1) % axis.size());
    }
    for (int64_t s = begin; s < end; ++s) {
      Arena::Scope one(lc.ctx.arena);
      SublayerSaved saved;
      sublayer(lc, residuals, s, saved, false, record, caches);
    }
    if (is_last(chunk)) continue;
    for (const int64_t s : entering(chunk + 1)) to.push_back(residuals[static_cast<size_t>(s)]);
    lc.mesh->pipeline.send_receive(to, (lc.mesh->pipeline.rank() + 1) % lc.mesh->pipeline.size(), {}, 0);
  }
  if (!holds(config_.layers - 1)) return;
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
  if (table_.head == kNone) return;
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
