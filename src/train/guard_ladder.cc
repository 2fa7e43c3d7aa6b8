// What the guard does: the rungs that answer a layer's alarms, and the re-initialisation of an expert.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "core/host_copy.h"
#include "core/philox.h"
#include "train/guard.h"

namespace tessera::train {

namespace {

constexpr double kZLoss = 1e-4;  // moe.md 6, rung 3
constexpr int64_t kFinerBins = 2;
constexpr double kFinerWidth = 0.1, kLeastWidth = 1e-9;
// Windows without an alarm after a rung: with the third after it, the layer has had as long as it takes to be cold.
constexpr int64_t kSettling = 2;
constexpr double kWeightNoise = 0.02, kRouterNoise = 0.05;

// to = values + N(0, (share rms(values))^2)
void copy_with_noise(std::span<const float> values, const View& to, double share, const Philox& random,
                     uint64_t first_draw) {
  const HostCopy made(to);
  const double squares = std::accumulate(values.begin(), values.end(), 0.0,
                                         [](double sum, float x) { return sum + double(x) * double(x); });
  const double rms = std::sqrt(squares / double(std::max<int64_t>(to.elements(), 1)));
  for (int64_t i = 0; i < to.elements(); ++i) {
    made.as<float>()[i] = values[static_cast<size_t>(i)] + float(share * rms * random.normal(first_draw + uint64_t(i)));
  }
  made.put_back();
}

std::vector<float> values_of(const View& view) {
  const HostCopy values(view);
  return {values.as<float>(), values.as<float>() + view.elements()};
}

bool is_here(const model::Parameter& p, int64_t expert) { return expert >= p.first && expert < p.first + p.stack; }

// An expert's part of a stack, from the process that has it.
std::vector<float> values_of_expert(const View& stack, const model::Parameter& p, int64_t expert, dist::Mesh* mesh) {
  std::vector<float> values(static_cast<size_t>(stack.row_elements()));
  if (is_here(p, expert)) values = values_of(stack.at(expert - p.first));
  if (mesh == nullptr || mesh->expert.alone()) return values;
  const auto has_it = mesh->expert.all_gather(int64_t{is_here(p, expert)});
  const auto owner = std::ranges::find(has_it, 1) - has_it.begin();
  mesh->expert.broadcast(View(values.data(), DType::f32, {std::ssize(values)}), static_cast<int>(owner));
  return values;
}

std::string describe(const model::RouterOptions& router, int64_t rung) {
  switch (rung) {
    case 1: return "centred bins, smoothing 0";
    case 2: return fmt::format("{} bins of width {}", router.balance.bins, router.balance.width);
    case 3: return fmt::format("router z-loss {}", router.z_loss);
    default: return "cold experts are re-initialised";
  }
}

}  // namespace

model::RouterOptions with_rung(model::RouterOptions router, int64_t rung) {
  ops::router::BalanceOptions& b = router.balance;
  const bool quantiles = ops::router::counts_quantiles(b.method);
  if (rung == 1 && quantiles) {
    b.method = ops::router::Balance::quantile_centred;
    b.smoothing = 0;
  } else if (rung == 2 && quantiles) {
    b.bins *= kFinerBins;
    b.width = std::max(b.width * kFinerWidth, kLeastWidth);
  } else if (rung == 3) {
    router.z_loss = kZLoss;
  }
  return router;
}

model::RouterOptions with_every_rung(model::RouterOptions router) {
  for (int64_t rung = 1; rung < Guard::kReviveRung; ++rung) router = with_rung(router, rung);
  return router;
}

model::RouterOptions Guard::router_of(const Layer& layer) const {
  model::RouterOptions router = options_.router;
  for (int64_t rung : layer.rungs) router = with_rung(router, rung);
  return router;
}

std::vector<model::RouterOptions> Guard::routers() const {
  std::vector<model::RouterOptions> all;
  for (const Layer& layer : layers_) all.push_back(options_.on ? router_of(layer) : options_.router);
  return all;
}

int64_t Guard::next_rung(const Layer& layer, const Findings& found, bool may_revive) const {
  const model::RouterOptions now = router_of(layer);
  for (int64_t rung = layer.rungs.empty() ? 1 : layer.rungs.back() + 1; rung < kStopRung; ++rung) {
    const auto revivable = [&](int64_t e) { return can_be_revived(layer, e); };
    const bool helps = rung == kReviveRung ? may_revive && (std::ranges::any_of(found.cold, revivable) ||
                                                            std::ranges::any_of(found.dead, revivable))
                                           : with_rung(now, rung) != now;
    if (helps) return rung;
  }
  return kStopRung;
}

GuardEvent Guard::take_rung(Layer& layer, int64_t rung, const Findings& found, const Signals& s,
                            GuardEvent event) const {
  if (layer.rungs.empty() || layer.rungs.back() < rung) layer.rungs.push_back(rung);
  layer.settling = kSettling;
  layer.uneven_steps = 0;
  event.experts = found.cold;
  event.vectors = {{"load", s.u}, {"omega", s.omega}, {"rho", s.rho}, {"gn", s.gn}};
  if (rung == kStopRung) {
    event.what = "stop";
    event.detail = found.alarm + ", and every remedy is used up";
  } else {
    event.what = "rung";
    event.detail = fmt::format("{} of {}, {}", rung, kStopRung, describe(router_of(layer), rung));
  }
  return event;
}

// Splits the donor: its weights with noise, its router row with noise, its bias; no memory of the old expert.
void Guard::revive(Layer& layer, int64_t expert, int64_t donor, int64_t step, const model::Weights& weights,
                   optim::Optimizer& optimizer) const {
  const model::MoeParams& p = model_->table().layer(layer.layer).moe;
  const Philox random(options_.seed ^ (uint64_t(layer.layer) << 40) ^ (uint64_t(expert) << 20), Purpose::guard,
                      static_cast<uint64_t>(step));
  uint64_t draw = 0;
  for (model::ParamId id : {p.w1, p.w3, p.w2}) {
    const View& master = weights.master[static_cast<size_t>(id)];
    const model::Parameter& stack = model_->table()[id];
    const std::vector<float> values = values_of_expert(master, stack, donor, model_->mesh());
    if (is_here(stack, expert)) {
      const int64_t here = expert - stack.first;
      copy_with_noise(values, master.at(here), kWeightNoise, random, draw);
      model::refresh_copy(weights, id, here);
      optimizer.reset_block(stack.name, here);
    }
    draw += values.size();
  }
  copy_with_noise(values_of(weights[p.router].at(donor)), weights[p.router].at(expert), kRouterNoise, random, draw);
  optimizer.reset_block(model_->table()[p.router].name, expert);
  const HostCopy biases(weights[p.bias]);
  float* bias = biases.as<float>();
  const int64_t experts = weights[p.bias].elements();
  bias[expert] = bias[donor];
  double mean = 0;
  for (int64_t e = 0; e < experts; ++e) mean += double(bias[e]) / double(experts);
  for (int64_t e = 0; e < experts; ++e) bias[e] = float(double(bias[e]) - mean);
  biases.put_back();
  Expert& revived = layer.experts[static_cast<size_t>(expert)];
  ++revived.revivals;
  revived.cold_windows = revived.dead_windows = revived.worthless_windows = 0;
}

}  // namespace tessera::train
