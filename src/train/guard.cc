#include "train/guard.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/host_copy.h"
#include "ops/elementwise/op.h"

namespace tessera::train {

namespace {

constexpr double kWarnLoad = 0.5, kWarnShare = 0.25;  // moe.md 6, thresholds
constexpr double kColdLoad = 0.1, kDeadLoad = 0.01;
constexpr double kBiasOnly = 0.9, kNoShare = 0.1, kNoGradient = 0.1;
constexpr int64_t kColdWindows = 3, kDeadWindows = 3, kWorthlessWindows = 5;
constexpr double kColdLayerShare = 0.05, kEntropyFloor = 0.9, kSpreadLimit = 1;
// The sampling floor falls with the tokens of a step; the drift of the scores from step to step, which the bias follows
// one step late, does not. So five floors alone would alarm for healthy runs of large steps: the fullest expert must
// also have more than twice its share.
constexpr double kVioFloors = 5, kVioLimit = 1;
constexpr int64_t kUnevenSteps = 50;

}  // namespace

std::string to_text(const GuardEvent& event) {
  const std::string experts = event.experts.empty() ? "" : fmt::format(" (experts {})", fmt::join(event.experts, ", "));
  return fmt::format("step {}, layer {}: {}{}: {}", event.step, event.layer, event.what, experts, event.detail);
}

Guard::Guard(const model::Model& model, GuardOptions options) : model_(&model), options_(options) {
  const model::ModelConfig& c = model.config();
  const size_t experts = static_cast<size_t>(c.moe.experts);
  for (int64_t l = 0; l < c.layers; ++l) {
    if (!model.has_moe(l)) continue;
    Layer layer;
    layer.layer = l;
    layer.window.resize(experts);
    layer.experts.resize(experts);
    layers_.push_back(std::move(layer));
  }
}

// (layers, 3, E): of the gradients of w1, w3, w2 of every expert, over all processes.
std::vector<double> Guard::gradient_squares(Context& ctx, const model::Weights& weights) const {
  const int64_t experts = model_->config().moe.experts, layers = std::ssize(layers_);
  std::vector<double> squares(static_cast<size_t>(layers * 3 * experts));
  const View all(squares.data(), DType::f64, {layers * 3, experts});
  Arena::Scope scope(ctx.arena);
  int64_t row = 0;
  for (const Layer& layer : layers_) {
    const model::MoeParams& p = model_->table().layer(layer.layer).moe;
    for (model::ParamId id : {p.w1, p.w3, p.w2}) {
      const model::Parameter& stack = model_->table()[id];
      const View sums = ctx.arena.allocate(DType::f64, {stack.stack});
      ops::elementwise::square_sums(ctx, weights.d(id), sums);
      copy(sums, all.at(row++).row_range(stack.first, stack.stack));
    }
  }
  if (model_->mesh() != nullptr) model_->mesh()->replica.all_reduce(all);
  return squares;
}

void Guard::observe(Context& ctx, const std::vector<ops::router::Counters>& counters, const model::Weights& weights) {
  if (!options_.on || ctx.dry()) return;
  const int64_t experts = model_->config().moe.experts;
  const std::vector<double> squares = gradient_squares(ctx, weights);
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    const HostCopy loads(counters[l].load), by_biases(counters[l].by_bias), shares(counters[l].weight);
    const HostCopy outputs(counters[l].output_squares);
    const int64_t *load = loads.as<int64_t>(), *by_bias = by_biases.as<int64_t>();
    const double *weight = shares.as<double>(), *output = outputs.as<double>();
    for (size_t matrix = 0; matrix < 3; ++matrix) {
      for (int64_t e = 0; e < experts; ++e) {
        layer.window[static_cast<size_t>(e)].gradient += squares[(l * 3 + matrix) * size_t(experts) + size_t(e)];
      }
    }
    for (int64_t e = 0; e < experts; ++e) {
      ExpertSums& sums = layer.window[static_cast<size_t>(e)];
      sums.load += double(load[e]);
      sums.by_bias += double(by_bias[e]);
      sums.weight += weight[e];
      sums.output += output[e];
    }
    const double q = double(std::accumulate(load, load + experts, int64_t{0})) / double(experts);
    const double max_vio = q > 0 ? double(*std::max_element(load, load + experts)) / q - 1 : 0;
    const double floor = q > 0 ? std::sqrt(2 * std::log(double(experts)) / q) : 0;
    const bool uneven = q > 0 && max_vio > std::max(kVioLimit, kVioFloors * floor);
    layer.uneven_steps = uneven ? layer.uneven_steps + 1 : 0;
  }
  ++steps_;
}

// Updates the counts of bad windows on the way.
Guard::Findings Guard::judge(Layer& layer, const Signals& s, const View& bias) const {
  Findings found;
  for (size_t e = 0; e < layer.experts.size(); ++e) {
    Expert& expert = layer.experts[e];
    const bool worthless = s.rho[e] > kBiasOnly && s.omega[e] < kNoShare && s.gn[e] < kNoGradient;
    expert.cold_windows = s.u[e] < kColdLoad ? expert.cold_windows + 1 : 0;
    expert.dead_windows = s.u[e] < kDeadLoad ? expert.dead_windows + 1 : 0;
    expert.worthless_windows = worthless ? expert.worthless_windows + 1 : 0;
    const int64_t id = static_cast<int64_t>(e);
    const bool dead = expert.dead_windows >= kDeadWindows || expert.worthless_windows >= kWorthlessWindows;
    if (dead) found.dead.push_back(id);
    if (expert.cold_windows >= kColdWindows) found.cold.push_back(id);
    if (s.u[e] < kWarnLoad || s.omega[e] < kWarnShare) found.warned.push_back(id);
  }
  if (layer.settling > 0) {
    --layer.settling;
    return found;
  }
  const HostCopy biases(bias);
  const float* b = biases.as<float>();
  const auto [least, most] = std::minmax_element(b, b + bias.elements());
  if (double(found.cold.size()) > kColdLayerShare * double(layer.experts.size()))
    found.alarm = "more than 5 % of the experts are cold";
  if (s.entropy < kEntropyFloor) found.alarm = fmt::format("load entropy {:.3f} of 1", s.entropy);
  if (double(*most - *least) > kSpreadLimit) found.alarm = "bias spread above the score range: scores are saturated";
  if (layer.uneven_steps >= kUnevenSteps) found.alarm = "MaxVio above 1 and five sampling floors for 50 steps";
  return found;
}

bool Guard::can_be_revived(const Layer& layer, int64_t expert) const {
  return layer.experts[static_cast<size_t>(expert)].revivals < options_.max_revivals;
}

// Reports one layer, revives its dead, and takes the next rung if it alarms.
void Guard::act_on(Layer& layer, bool may_revive, const Signals& s, const GuardEvent& base,
                   const model::Weights& weights, optim::Optimizer& optimizer, std::vector<GuardEvent>& events) const {
  const auto add = [&](const char* what, const std::vector<int64_t>& experts, std::string detail) {
    GuardEvent event = base;
    event.what = what;
    event.experts = experts;
    event.detail = std::move(detail);
    events.push_back(std::move(event));
  };
  const Findings found = judge(layer, s, weights[model_->table().layer(layer.layer).moe.bias]);
  if (!found.warned.empty())
    add("warn", found.warned, "load below half, or mixing weight below a quarter, of the mean");
  if (!found.cold.empty()) add("cold", found.cold, "load below a tenth of the mean for three windows");
  if (!found.dead.empty())
    add("dead", found.dead, "no load for three windows, or chosen by the bias alone without effect for five");
  if (!found.alarm.empty())
    add("alarm", found.cold,
        found.alarm + (options_.escalate ? "" : "; set guard.escalate = true to have it answered"));
  const bool answers = options_.escalate && !found.alarm.empty();
  const int64_t rung = answers ? next_rung(layer, found, may_revive) : 0;

  std::vector<int64_t> weak = found.dead;
  for (int64_t e : found.cold) {
    if (rung == kReviveRung && std::ranges::find(weak, e) == weak.end()) weak.push_back(e);
  }
  int64_t left = may_revive ? std::max<int64_t>(1, model_->config().moe.experts / 128) : 0;
  std::vector<double> strength = s.omega;  // of experts that have not been a donor in this window
  for (int64_t e : weak) {
    if (!can_be_revived(layer, e)) {
      add("alarm", {e},
          fmt::format(
              "expert {} died again after {} re-initialisations; lower optim.learning_rate or use fewer experts", e,
              options_.max_revivals));
    } else if (left > 0) {
      --left;
      const int64_t donor = std::ranges::max_element(strength) - strength.begin();
      strength[static_cast<size_t>(donor)] = -1;
      revive(layer, e, donor, base.step, weights, optimizer);
      add("revived", {e}, fmt::format("as a copy of expert {} with noise", donor));
    }
  }
  if (rung > 0) events.push_back(take_rung(layer, rung, found, s, base));
}

static std::vector<double> values_of(const View& view) {
  const HostCopy values(view);
  return {values.as<float>(), values.as<float>() + view.elements()};
}

// In the order of the layers. As CBOR, which keeps every bit of a number.
static std::vector<GuardEvent> everyones(dist::Communicator& axis, const std::vector<GuardEvent>& own) {
  nlohmann::json rows = nlohmann::json::array();
  for (const GuardEvent& e : own) rows.push_back({e.step, e.layer, e.what, e.experts, e.detail, e.vectors});
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(rows);
  std::vector<GuardEvent> all;
  for (const std::string& of_one : axis.all_gather(std::string(bytes.begin(), bytes.end()))) {
    for (const auto& row : nlohmann::json::from_cbor(of_one)) {
      all.push_back({row.at(0), row.at(1), row.at(2), row.at(3).get<std::vector<int64_t>>(), row.at(4),
                     row.at(5).get<decltype(GuardEvent::vectors)>()});
    }
  }
  std::ranges::stable_sort(all, {}, &GuardEvent::layer);
  return all;
}

std::vector<GuardEvent> Guard::act(int64_t step, bool decaying, const model::Weights& weights,
                                   optim::Optimizer& optimizer) {
  std::vector<GuardEvent> events;
  if (!options_.on || steps_ < options_.window) return events;
  for (Layer& layer : layers_) {
    const Signals s = signals_of(layer.window);
    const model::MoeParams& p = model_->table().layer(layer.layer).moe;
    GuardEvent base;
    base.step = step;
    base.layer = layer.layer + 1;
    if (step > options_.grace) act_on(layer, options_.revive && !decaying, s, base, weights, optimizer, events);
    if (step % options_.audit < options_.window && step >= options_.audit) {
      base.what = "audit";
      base.vectors = {{"load", s.u},
                      {"omega", s.omega},
                      {"rho", s.rho},
                      {"b", values_of(weights[p.bias])},
                      {"on", s.on},
                      {"gn", s.gn},
                      {"cosine", router_cosines(weights[p.router])}};
      events.push_back(base);
    }
    std::ranges::fill(layer.window, ExpertSums{});
  }
  steps_ = 0;
  if (dist::Communicator* axis = pipeline()) events = everyones(*axis, events);
  return events;
}

dist::Communicator* Guard::pipeline() const {
  return model_->stages().count() > 1 ? &model_->mesh()->pipeline : nullptr;
}

std::string Guard::state() const {
  std::map<int64_t, nlohmann::json> by_layer;
  for (const Layer& layer : layers_) {
    nlohmann::json experts = nlohmann::json::array(), window = nlohmann::json::array();
    for (const Expert& e : layer.experts) {
      experts.push_back({e.cold_windows, e.dead_windows, e.worthless_windows, e.revivals});
    }
    for (const ExpertSums& e : layer.window) window.push_back({e.load, e.weight, e.by_bias, e.gradient, e.output});
    by_layer[layer.layer] = {{"uneven_steps", layer.uneven_steps},
                             {"rungs", layer.rungs},
                             {"settling", layer.settling},
                             {"experts", experts},
                             {"window", window}};
  }
  if (dist::Communicator* axis = pipeline()) {
    const nlohmann::json own = by_layer;
    for (const std::string& of_one : axis->all_gather(own.dump())) {
      by_layer.merge(nlohmann::json::parse(of_one).get<std::map<int64_t, nlohmann::json>>());
    }
  }
  nlohmann::json j{{"steps", steps_}, {"layers", nlohmann::json::array()}};
  for (auto& [layer, of_layer] : by_layer) j["layers"].push_back(std::move(of_layer));
  return j.dump();
}

void Guard::restore(const std::string& text) {
  try {
    const auto j = nlohmann::json::parse(text);
    if (!j.contains("layers")) return;
    const model::ModelConfig& c = model_->config();
    const int64_t routers = c.moe.experts > 0 ? std::max<int64_t>(c.layers - c.ffn.dense_layers, 0) : 0;
    TESSERA_CHECK(std::ssize(j["layers"]) == routers, "guard state of {} layers for {}", j["layers"].size(), routers);
    steps_ = j.at("steps");
    for (Layer& layer : layers_) {
      const auto& from = j["layers"][static_cast<size_t>(layer.layer - c.ffn.dense_layers)];
      layer.uneven_steps = from.at("uneven_steps");
      layer.rungs = from.at("rungs").get<std::vector<int64_t>>();
      layer.settling = from.at("settling");
      for (size_t i = 0; i < layer.experts.size(); ++i) {
        const auto &e = from.at("experts").at(i), &sums = from.at("window").at(i);
        layer.experts[i] = {e.at(0), e.at(1), e.at(2), e.at(3)};
        layer.window[i] = {sums.at(0), sums.at(1), sums.at(2), sums.at(3), sums.at(4)};
      }
    }
  } catch (const nlohmann::json::exception& e) {
    fail_user("the guard's part of the training state cannot be read ({}); it was not written by a compatible version",
              e.what());
  }
}

}  // namespace tessera::train
