#include "model/accounting.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tessera::model {

DryStep dry_step(const Model& model, const Documents& documents, DType dtype, Product product, bool with_counters) {
  DryStep result;
  Arena arena = Arena::dry();
  Context ctx{Device::dry, arena, &result.ledger, product};
  const Weights weights = allocate_weights(arena, model.table(), dtype, true);
  StepRecord record;
  if (with_counters) record = model.allocate_record(arena, dtype, {.max_logit = true});
  const int64_t base = arena.used();
  const int64_t tokens = documents.tokens();
  const Batch batch{View(nullptr, DType::i32, {tokens}), View(nullptr, DType::i32, {tokens}), documents};
  const View loss(nullptr, dtype, {tokens});
  model.forward_backward(ctx, weights, batch, 1.0, loss, with_counters ? &record : nullptr);
  result.peak_bytes = arena.peak() - base;
  return result;
}

// An evaluation, dry: the forward alone, head included (in training the head's forward is part of its backward).
static Ledger dry_forward(const Model& model, const Documents& documents) {
  Ledger ledger;
  Arena arena = Arena::dry();
  Context ctx{Device::dry, arena, &ledger};
  const Weights weights = allocate_weights(arena, model.table(), DType::f32, false);
  const int64_t tokens = documents.tokens();
  const Batch batch{View(nullptr, DType::i32, {tokens}), View(nullptr, DType::i32, {tokens}), documents};
  model.evaluate(ctx, weights, batch, View(nullptr, DType::f32, {tokens}), nullptr);
  return ledger;
}

static std::vector<ComponentCount> count_components(const ParameterTable& table) {
  std::vector<ComponentCount> rows;
  for (const Parameter& p : table.all()) {
    if (p.group == Group::buffer) continue;
    auto row = std::ranges::find(rows, p.component, &ComponentCount::component);
    if (row == rows.end()) row = rows.insert(rows.end(), {p.component, 0, 0, 0});
    row->total_params += p.elements();
    row->active_params += std::llround(double(p.elements()) * p.active_share);
    row->tensors += std::max<int64_t>(p.stack, 1);
  }
  return rows;
}

ModelCosts model_costs(const Model& model, int64_t context_tokens) {
  const ModelConfig& c = model.config();
  ModelCosts costs;
  costs.total_params = model.table().total();
  costs.active_params = model.table().active();
  costs.by_component = count_components(model.table());
  const int64_t kda_layers = c.layers - model.mla_layers(), inner = c.kda.heads * c.kda.head_dim;
  costs.kda_state_bytes_per_sequence = kda_layers * inner * c.kda.head_dim * bytes_of(DType::f32);
  costs.conv_bytes_per_sequence = kda_layers * 3 * (c.kda.conv_width - 1) * inner * bytes_of(DType::bf16);
  costs.latent_cache_bytes_per_token = model.mla_layers() * (c.mla.kv_rank + c.mla.rope_dim) * bytes_of(DType::bf16);

  const std::array<int64_t, 2> one_document{0, context_tokens};
  const DryStep step = dry_step(model, {one_document}, DType::f32, Product::f32, false);
  const Flops total = step.ledger.total().gemm_flops;
  const Flops forward = dry_forward(model, {one_document}).total().gemm_flops;
  costs.context_tokens = context_tokens;
  costs.forward_flops_per_token = static_cast<int64_t>(forward / context_tokens);
  costs.step_flops_per_token = static_cast<int64_t>(total / context_tokens);
  costs.activation_bytes = step.peak_bytes;
  return costs;
}

}  // namespace tessera::model
