#include "train/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "optim/gradient_norm.h"
#include "optim/qk_clip.h"
#include "train/step_sums.h"

namespace tessera::train {

// With the guard on: what it watches, and room for the bins it may ask for.
static model::RecordOptions record_options(const RunConfig& run) {
  const model::RouterOptions router{.balance = run.balance};
  model::RecordOptions options{.router = router, .max_logit = run.optim.qk_clip > 0};
  if (run.guard.on) options.counters = {true, with_every_rung(router).balance.bins};
  return options;
}

Stepper::Stepper(Context& ctx, const model::Model& model, const RunConfig& run)
    : model_(model),
      run_(run),
      weights_(model::allocate_weights(ctx.arena, model.table(), ctx.activations(), true)),
      ownership_(ctx.arena, slots(run), model.mesh()),
      optimizer_(ownership_.own(), run.optim.rules),
      record_(model.allocate_record(ctx.arena, DType::f32, record_options(run))) {
  if (model.stages().count() > 1) pipeline_.emplace(model);
  optimizer_.allocate_state(ctx);
  Arena::Label label(ctx.arena, "batch buffers");
  ids_ = ctx.arena.allocate(DType::i32, {run.train.micro_tokens});
  targets_ = ctx.arena.allocate(DType::i32, {run.train.micro_tokens});
  losses_ = ctx.arena.allocate(DType::f32, {run.train.micro_tokens});
  if (ctx.back_end() == Device::cuda) offsets_ = ctx.arena.allocate(DType::i64, {run.train.micro_tokens + 1});
  static_bytes_ = ctx.arena.used();
}

// Absent where the master is what ops read.
static View working_copy(const model::Weights& weights, model::ParamId id) {
  return weights[id].dtype() == DType::bf16 ? weights[id] : View();
}

std::vector<Ownership::Shared> Stepper::slots(const RunConfig& run) const {
  std::vector<Ownership::Shared> slots;
  for (model::ParamId id = 0; id < model_.table().size(); ++id) {
    const model::Parameter& p = model_.table()[id];
    if (p.group == model::Group::buffer) continue;
    const optim::Slot slot{.name = p.name,
                           .value = weights_.master[static_cast<size_t>(id)],
                           .gradient = weights_.d(id),
                           .rule = p.group == model::Group::matrix ? optim::Rule::muon : optim::Rule::adamw,
                           .blocks = p.blocks,
                           .weight_decay = p.group == model::Group::vector ? 0 : run.optim.weight_decay,
                           .decay_idle = p.stack == 0 || run.optim.decay_idle_experts,
                           .copy = working_copy(weights_, id),
                           .first_row = p.stack > 0 ? 0 : p.first};
    slots.push_back({.held = {slot, p.cut, p.cut_through, p.whole}, .expert = p.stack > 0});
  }
  return slots;
}

void Stepper::initialise(uint64_t seed) {
  if (weights_.master.front().memory() == Memory::host) {
    return model::initialise(model_.config(), model_.table(), weights_, seed);
  }
  Arena plan = Arena::dry();
  model::allocate_weights(plan, model_.table(), DType::f32, false);
  Arena arena(plan.peak());
  const model::Weights host = model::allocate_weights(arena, model_.table(), DType::f32, false);
  model::initialise(model_.config(), model_.table(), host, seed);
  model::assign(host.value, weights_);
}

static void upload(const void* host, DType dtype, const View& to) {
  if (host != nullptr) copy(View(const_cast<void*>(host), dtype, to.shape()), to);
}

model::Batch Stepper::place(Context& ctx, const int32_t* ids, const int32_t* targets,
                            std::span<const int64_t> offsets) const {
  dist::Mesh* mesh = model_.mesh();
  if (mesh == nullptr || mesh->context.alone()) return place_tokens(ctx, ids, targets, offsets);
  const auto shard = std::make_shared<const model::ContextShard>(mesh->context, offsets);
  const int64_t begin = shard->begin(shard->rank());
  model::Batch own = place_tokens(ctx, ids != nullptr ? ids + begin : ids,
                                  targets != nullptr ? targets + begin : targets, shard->offsets());
  own.shard = shard;
  return own;
}

model::Batch Stepper::place_tokens(Context& ctx, const int32_t* ids, const int32_t* targets,
                                   std::span<const int64_t> offsets) const {
  const int64_t tokens = offsets.back();
  model::Batch batch{ids_.row_range(0, tokens), targets_.row_range(0, tokens), {offsets}};
  upload(ids, DType::i32, batch.ids);
  upload(targets, DType::i32, batch.targets);
  if (ctx.device != Device::cuda) return batch;
  const View on_gpu = offsets_.row_range(0, static_cast<int64_t>(offsets.size()));
  upload(offsets.data(), DType::i64, on_gpu);
  batch.documents.gpu_offsets = on_gpu.gpu<int64_t>();
  return batch;
}

double Stepper::accumulate(Context& ctx, const model::Batch& batch, int64_t loss_tokens) {
  const int64_t tokens = batch.ids.elements();
  if (tokens == 0 && model_.mesh() == nullptr) return 0;  // others may wait for this process
  const View loss = losses_.row_range(0, tokens);
  model_.forward_backward(ctx, weights_, batch, loss_tokens > 0 ? 1.0 / double(loss_tokens) : 0.0, loss, &record_);
  if (ctx.dry()) return 0;
  std::vector<float> host(static_cast<size_t>(tokens));
  copy(loss, View(host.data(), DType::f32, loss.shape()));
  return std::accumulate(host.begin(), host.end(), 0.0);
}

double Stepper::accumulate(Context& ctx, std::span<const MicroBatch> batches, int64_t loss_tokens) {
  if (pipeline_) {
    return pipeline_->run(ctx, {.weights = weights_,
                                .record = record_,
                                .batches = batches,
                                .scale = loss_tokens > 0 ? 1.0 / double(loss_tokens) : 0.0,
                                .losses = losses_,
                                .count = run_.micro_batches_per_step() / run_.parallel.data});
  }
  double loss = 0;
  for (const MicroBatch& b : batches) loss += accumulate(ctx, place(ctx, b.ids, b.targets, b.offsets), loss_tokens);
  return loss;
}

std::string StepReport::refusal() const {
  if (finite) return "";
  const char* changed =
      "the step changed nothing; if it comes back, lower optim.learning_rate or start again from an "
      "earlier checkpoint";
  if (blind_routers.empty()) return fmt::format("the gradient is not finite; {}", changed);
  return fmt::format("the router of layer {} met NaN or infinity; {}", fmt::join(blind_routers, ", "), changed);
}

// A token whose logits are not finite goes to no expert, so that neither loss nor gradient would show it.
std::vector<int64_t> Stepper::blind_routers() const {
  std::vector<int64_t> layers;
  size_t moe = 0;
  for (int64_t l = 0; l < model_.config().layers; ++l) {
    if (!model_.has_moe(l)) continue;
    int64_t rows = 0;
    copy(record_.counters[moe++].invalid, View(&rows, DType::i64, {1}));
    if (rows > 0) layers.push_back(l + 1);
  }
  if (pipeline_) layers = gather_rows(model_.mesh()->pipeline, layers);
  std::ranges::sort(layers);
  return layers;
}

int64_t Stepper::clip_heads(Context& ctx) const {
  const model::ModelConfig& c = model_.config();
  std::vector<optim::QkClipLayer> layers;
  for (int64_t l = 0; l < c.layers && !record_.max_logit.empty(); ++l) {
    if (!model_.has_mla(l)) continue;
    const model::MlaParams& p = model_.table().layer(l).mla;
    const model::ParamId query = p.q_proj != model::kNone ? p.q_proj : p.q_b;
    layers.push_back({.max_logit = record_.max_logit[layers.size()],
                      .q_proj = weights_.master[static_cast<size_t>(query)],
                      .kv_b = weights_.master[static_cast<size_t>(p.kv_b)],
                      .q_copy = working_copy(weights_, query),
                      .kv_copy = working_copy(weights_, p.kv_b)});
  }
  if (layers.empty()) return 0;
  const int64_t heads = layers.front().max_logit.elements();  // that are here
  const int64_t clipped =
      optim::qk_clip(ctx, {heads, c.mla.nope_dim, c.mla.rope_dim, c.mla.value_dim, run_.optim.qk_clip}, layers);
  return model_.mesh() != nullptr ? model_.mesh()->tensor.sum(clipped) : clipped;
}

optim::StepReport Stepper::update(Context& ctx, double learning_rate, int64_t step) {
  ownership_.reduce_gradients(ctx);
  double norm = optim::gradient_norm(ctx, ownership_.counted());
  if (model_.mesh() != nullptr) norm = std::sqrt(ownership_.sum(norm * norm));
  const optim::StepReport report = optimizer_.step(ctx, learning_rate, step, norm);
  if (report.finite) ownership_.publish_values(ctx);
  return report;
}

StepReport Stepper::finish(Context& ctx, double learning_rate, int64_t step, Guard* guard) {
  StepReport report;
  dist::Mesh* mesh = model_.mesh();
  if (mesh != nullptr) sum_record(mesh->replica, record_);
  if (!ctx.dry()) report.blind_routers = blind_routers();
  const optim::StepReport update = report.blind_routers.empty()
                                       ? this->update(ctx, learning_rate, step)
                                       : optim::StepReport{std::numeric_limits<double>::quiet_NaN(), 1, false};
  report.gradient_norm = update.gradient_norm;
  report.clip_scale = update.clip_scale;
  report.finite = update.finite;
  if (update.finite) report.heads_clipped = clip_heads(ctx);
  if (pipeline_) report.heads_clipped = mesh->pipeline.sum(report.heads_clipped);
  for (const View& max_logit : record_.max_logit) max_logit.zero();
  if (guard != nullptr && update.finite) guard->observe(ctx, record_.counters, weights_);
  model::zero_gradients(weights_);
  if (!ctx.dry()) report.balance = balance_routers(update.finite);
  return report;
}

// Of all layers, each by the process that has it.
std::vector<ops::router::BalanceReport> Stepper::balance_routers(bool finite) const {
  struct Row {
    int64_t layer;
    ops::router::BalanceReport report;
  };
  const model::ModelConfig& c = model_.config();
  const ops::router::Dims dims{0, c.moe.experts, c.moe.top_k};
  dist::Mesh* mesh = model_.mesh();
  std::vector<Row> rows;
  size_t moe = 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    if (!model_.has_moe(l)) continue;
    const ops::router::BalanceOptions& options = record_.routers[moe].balance;
    const ops::router::Counters& counters = record_.counters[moe++];
    if (finite) {
      rows.push_back({l, ops::router::balance(dims, options, weights_[model_.table().layer(l).moe.bias], counters)});
      if (mesh != nullptr) keep_histogram_once(mesh->replica, counters);
    } else {
      ops::router::clear(counters);
    }
  }
  if (pipeline_) rows = gather_rows(mesh->pipeline, rows);
  std::ranges::sort(rows, {}, &Row::layer);
  std::vector<ops::router::BalanceReport> reports;
  for (const Row& row : rows) reports.push_back(row.report);
  return reports;
}

void Stepper::set_routers(const std::vector<model::RouterOptions>& routers) {
  TESSERA_CHECK(routers.size() == record_.routers.size(), "options of {} routers for {}", routers.size(),
                record_.routers.size());
  for (size_t l = 0; l < routers.size(); ++l) {
    if (routers[l].balance != record_.routers[l].balance) restart(record_.counters[l], routers[l].balance);
  }
  record_.routers = routers;
}

// Stacked experts are spelled out one by one, as they are published.
static void spell_out(const Piece& piece, std::vector<Piece>& pieces) {
  const size_t hole = piece.name.find("{}");
  if (hole == std::string::npos) return pieces.push_back(piece);
  for (int64_t e = 0; e < piece.view.rows(); ++e) {
    const View expert = piece.view.at(e);
    pieces.push_back({piece.name.substr(0, hole) + std::to_string(piece.first_row + e) + piece.name.substr(hole + 2),
                      expert.shape(), 0, expert, piece.saved});
  }
}

std::vector<Piece> Stepper::state() const {
  const dist::Mesh* mesh = model_.mesh();
  const bool first = mesh == nullptr || mesh->replica.rank() == 0;
  const bool first_with_experts = mesh == nullptr || mesh->expert_replica.rank() == 0;
  const bool first_of_tensor = mesh == nullptr || mesh->tensor.rank() == 0;
  const auto cut = [](const model::Parameter& p) { return p.shape != p.whole; };
  std::vector<Piece> pieces;
  std::map<std::string_view, const model::Parameter*> parameters;
  for (model::ParamId id = 0; id < model_.table().size(); ++id) {
    const model::Parameter& p = model_.table()[id];
    parameters[p.name] = &p;
    const bool saved = (p.stack > 0 ? first_with_experts : first) && (cut(p) || first_of_tensor);
    spell_out({p.name, p.whole, p.first, weights_.master[static_cast<size_t>(id)], saved, p.first_column}, pieces);
  }
  for (const auto& [name, parameter, view, first_row] : optimizer_.state()) {
    const model::Parameter& p = *parameters.at(parameter);
    spell_out({name, p.whole, (p.stack > 0 ? p.first : 0) + first_row, view, cut(p) || first_of_tensor}, pieces);
  }
  for (const auto& [name, view] : pending_counts()) {
    if (first || !name.ends_with(".histogram"))
      pieces.push_back({name, view.shape(), 0, view, first && first_of_tensor});
  }
  return pieces;
}

std::vector<model::NamedView> Stepper::pending_counts() const {
  std::vector<model::NamedView> named;
  size_t moe = 0, number = 0;  // of a layer among the MoE layers: of this process, of the model
  for (int64_t l = 0; l < model_.config().layers; ++l) {
    number += l > 0 && model_.config().is_moe(l - 1);
    if (!model_.has_moe(l)) continue;
    const ops::router::Counters& c = record_.counters[moe++];
    for (const auto& [what, view] : {std::pair{"load", c.pending_load}, std::pair{"histogram", c.histogram},
                                     std::pair{"tokens", c.pending_tokens}}) {
      if (view.present()) named.push_back({fmt::format("balance.{}.{}", number, what), view});
    }
  }
  return named;
}

}  // namespace tessera::train
