#include "train/guard.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/philox.h"

namespace tessera::train {

namespace {

constexpr double kWarnLoad = 0.5, kWarnShare = 0.25;  // moe.md 6, thresholds
constexpr double kColdLoad = 0.1, kDeadLoad = 0.01;
constexpr int64_t kColdWindows = 3, kDeadWindows = 3, kWorthlessWindows = 5;
constexpr double kColdLayerShare = 0.05, kEntropyFloor = 0.9, kSpreadLimit = 1, kVioFloors = 5;
constexpr int64_t kUnevenSteps = 50;
constexpr double kWeightNoise = 0.02, kRouterNoise = 0.05;

double square_sum(const View& view) {
  double sum = 0;
  const float* x = view.as<float>();
  for (int64_t i = 0; i < view.elements(); ++i) sum += double(x[i]) * double(x[i]);
  return sum;
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::nth_element(v.begin(), v.begin() + int64_t(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// to = from + N(0, (share rms(from))^2)
void copy_with_noise(const View& from, const View& to, double share, const Philox& random, uint64_t first_draw) {
  const double rms = std::sqrt(square_sum(from) / double(std::max<int64_t>(from.elements(), 1)));
  for (int64_t i = 0; i < from.elements(); ++i) {
    to.as<float>()[i] = from.as<float>()[i] + float(share * rms * random.normal(first_draw + uint64_t(i)));
  }
}

}  // namespace

Guard::Guard(const model::Model& model, GuardOptions options) : model_(&model), options_(options) {
  const model::ModelConfig& c = model.config();
  for (int64_t l = 0; l < c.layers; ++l) {
    if (c.is_moe(l)) layers_.push_back({l, std::vector<Expert>(static_cast<size_t>(c.moe.experts)), 0});
  }
}

void Guard::observe(const std::vector<ops::router::Counters>& counters, const model::Weights& weights) {
  if (!options_.on) return;
  const int64_t experts = model_->config().moe.experts;
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    const model::MoeParams& p = model_->table().layer(layer.layer).moe;
    const int64_t* load = counters[l].load.as<int64_t>();
    const int64_t* by_bias = counters[l].by_bias.as<int64_t>();
    const double* weight = counters[l].weight.as<double>();
    for (int64_t e = 0; e < experts; ++e) {
      Expert& expert = layer.experts[static_cast<size_t>(e)];
      expert.load += double(load[e]);
      expert.by_bias += double(by_bias[e]);
      expert.weight += weight[e];
      for (model::ParamId id : {p.w1, p.w3, p.w2}) expert.gradient += square_sum(weights.d(id).at(e));
    }
    const double q = double(std::accumulate(load, load + experts, int64_t{0})) / double(experts);
    const double max_vio = q > 0 ? double(*std::max_element(load, load + experts)) / q - 1 : 0;
    const bool uneven = q > 0 && max_vio > kVioFloors * std::sqrt(2 * std::log(double(experts)) / q);
    layer.uneven_steps = uneven ? layer.uneven_steps + 1 : 0;
  }
  ++steps_;
}

Guard::Signals Guard::signals(const Layer& layer) const {
  Signals s;
  double load = 0, weight = 0;
  for (const Expert& e : layer.experts) {
    load += e.load;
    weight += e.weight;
    s.gn.push_back(std::sqrt(e.gradient));
  }
  const double n = double(layer.experts.size()), typical = median(s.gn);
  double entropy = 0;
  for (size_t e = 0; e < layer.experts.size(); ++e) {
    const Expert& expert = layer.experts[e];
    s.u.push_back(load > 0 ? expert.load / load * n : 0);
    s.omega.push_back(weight > 0 ? expert.weight / weight * n : 0);
    s.rho.push_back(expert.load > 0 ? expert.by_bias / expert.load : 0);
    s.gn[e] = typical > 0 ? s.gn[e] / typical : 0;
    if (expert.load > 0) entropy -= expert.load / load * std::log(expert.load / load);
  }
  s.entropy = n > 1 ? entropy / std::log(n) : 1;
  return s;
}

// Updates the counts of bad windows, adds events, and lists the dead.
void Guard::judge(Layer& layer, const Signals& s, GuardEvent base, const View& bias, std::vector<GuardEvent>& events,
                  std::vector<int64_t>& dead) const {
  std::vector<int64_t> warned, cold;
  for (size_t e = 0; e < layer.experts.size(); ++e) {
    Expert& expert = layer.experts[e];
    const bool worthless = s.rho[e] > 0.9 && s.omega[e] < 0.1 && s.gn[e] < 0.1;
    expert.cold_windows = s.u[e] < kColdLoad ? expert.cold_windows + 1 : 0;
    expert.dead_windows = s.u[e] < kDeadLoad ? expert.dead_windows + 1 : 0;
    expert.worthless_windows = worthless ? expert.worthless_windows + 1 : 0;
    const int64_t id = static_cast<int64_t>(e);
    if (expert.dead_windows >= kDeadWindows || expert.worthless_windows >= kWorthlessWindows) dead.push_back(id);
    if (expert.cold_windows >= kColdWindows) cold.push_back(id);
    if (s.u[e] < kWarnLoad || s.omega[e] < kWarnShare) warned.push_back(id);
  }
  const auto add = [&](const char* what, const std::vector<int64_t>& experts, std::string detail) {
    GuardEvent event = base;
    event.what = what;
    event.experts = experts;
    event.detail = std::move(detail);
    events.push_back(std::move(event));
  };
  if (!warned.empty()) add("warn", warned, "load below half, or mixing weight below a quarter, of the mean");
  if (!cold.empty()) add("cold", cold, "load below a tenth of the mean for three windows");
  if (!dead.empty())
    add("dead", dead, "no load for three windows, or chosen by the bias alone without effect for five");
  const float* b = bias.as<float>();
  const auto [least, most] = std::minmax_element(b, b + bias.elements());
  std::string alarm;
  if (double(cold.size()) > kColdLayerShare * double(layer.experts.size()))
    alarm = "more than 5 % of the experts are cold";
  if (s.entropy < kEntropyFloor) alarm = fmt::format("load entropy {:.3f} of 1", s.entropy);
  if (double(*most - *least) > kSpreadLimit) alarm = "bias spread above the score range: scores are saturated";
  if (layer.uneven_steps >= kUnevenSteps) alarm = "MaxVio above five sampling floors for 50 steps";
  if (!alarm.empty()) {
    add("alarm", {},
        alarm + "; use balance.method = \"quantile_centred\" with smoothing 0, more bins or a smaller width");
  }
}

// Splits the strongest expert: its weights with noise, its router row with noise, its bias; no memory of the old one.
void Guard::revive(Layer& layer, int64_t expert, const Signals& s, int64_t step, const model::Weights& weights,
                   optim::Optimizer& optimizer) const {
  const model::MoeParams& p = model_->table().layer(layer.layer).moe;
  const int64_t donor = std::max_element(s.omega.begin(), s.omega.end()) - s.omega.begin();
  const Philox random(options_.seed ^ (uint64_t(layer.layer) << 40) ^ (uint64_t(expert) << 20), Purpose::guard,
                      static_cast<uint64_t>(step));
  uint64_t draw = 0;
  for (model::ParamId id : {p.w1, p.w3, p.w2}) {
    copy_with_noise(weights[id].at(donor), weights[id].at(expert), kWeightNoise, random, draw);
    draw += static_cast<uint64_t>(weights[id].row_elements());
    optimizer.reset_block(model_->table()[id].name, expert);
  }
  copy_with_noise(weights[p.router].at(donor), weights[p.router].at(expert), kRouterNoise, random, draw);
  optimizer.reset_block(model_->table()[p.router].name, expert);
  float* bias = weights[p.bias].as<float>();
  const int64_t experts = weights[p.bias].elements();
  bias[expert] = bias[donor];
  double mean = 0;
  for (int64_t e = 0; e < experts; ++e) mean += double(bias[e]) / double(experts);
  for (int64_t e = 0; e < experts; ++e) bias[e] = float(double(bias[e]) - mean);
  Expert& revived = layer.experts[static_cast<size_t>(expert)];
  ++revived.revivals;
  revived.cold_windows = revived.dead_windows = revived.worthless_windows = 0;
}

std::vector<GuardEvent> Guard::act(int64_t step, bool decaying, const model::Weights& weights,
                                   optim::Optimizer& optimizer) {
  std::vector<GuardEvent> events;
  if (!options_.on || steps_ < options_.window) return events;
  const int64_t at_once = std::max<int64_t>(1, model_->config().moe.experts / 128);
  for (Layer& layer : layers_) {
    const Signals s = signals(layer);
    GuardEvent base;
    base.step = step;
    base.layer = layer.layer + 1;
    std::vector<int64_t> dead;
    if (step > options_.grace) {
      judge(layer, s, base, weights[model_->table().layer(layer.layer).moe.bias], events, dead);
    }
    int64_t revived = 0;
    for (int64_t e : dead) {
      if (layer.experts[size_t(e)].revivals >= options_.max_revivals) {
        GuardEvent event = base;
        event.what = "alarm";
        event.experts = {e};
        event.detail = fmt::format(
            "expert {} died again after {} re-initialisations; lower optim.learning_rate or use "
            "fewer experts",
            e, options_.max_revivals);
        events.push_back(event);
      }
      const bool may = options_.revive && !decaying && layer.experts[size_t(e)].revivals < options_.max_revivals;
      if (!may || revived >= at_once) continue;
      ++revived;
      revive(layer, e, s, step, weights, optimizer);
      GuardEvent event = base;
      event.what = "revived";
      event.experts = {e};
      events.push_back(event);
    }
    if (step % options_.audit < options_.window && step >= options_.audit) {
      GuardEvent event = base;
      event.what = "audit";
      event.vectors = {{"load", s.u}, {"weight", s.omega}, {"by_bias", s.rho}, {"gradient", s.gn}};
      events.push_back(event);
    }
    for (Expert& e : layer.experts) e.load = e.weight = e.by_bias = e.gradient = 0;
  }
  steps_ = 0;
  return events;
}

std::string Guard::state() const {
  nlohmann::json j{{"steps", steps_}, {"layers", nlohmann::json::array()}};
  for (const Layer& layer : layers_) {
    nlohmann::json experts = nlohmann::json::array();
    for (const Expert& e : layer.experts) {
      experts.push_back(
          {e.load, e.weight, e.by_bias, e.gradient, e.cold_windows, e.dead_windows, e.worthless_windows, e.revivals});
    }
    j["layers"].push_back({{"uneven_steps", layer.uneven_steps}, {"experts", experts}});
  }
  return j.dump();
}

void Guard::restore(const std::string& text) {
  const auto j = nlohmann::json::parse(text);
  if (!j.contains("layers")) return;
  TESSERA_CHECK(j["layers"].size() == layers_.size(), "guard state of {} layers for {}", j["layers"].size(),
                layers_.size());
  steps_ = j["steps"];
  for (size_t l = 0; l < layers_.size(); ++l) {
    layers_[l].uneven_steps = j["layers"][l]["uneven_steps"];
    for (size_t i = 0; i < layers_[l].experts.size(); ++i) {
      const auto& from = j["layers"][l]["experts"].at(i);
      Expert& e = layers_[l].experts[i];
      e = {from[0], from[1], from[2], from[3], from[4], from[5], from[6], from[7]};
    }
  }
}

}  // namespace tessera::train
