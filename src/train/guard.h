// Collapse guard: quantile balancing makes loads equal, so loads alone cannot show a dead expert; value can.
//
// Over windows of W steps it watches, for each expert, its load u (over the mean), its share omega of the mixing weight
// (1 on average), how often only the bias chose it (rho), and its gradient gn (over the layer's median). It warns,
// alarms, and re-initialises dead experts from a strong donor with noise keyed by (seed, layer, expert, step), so that
// every rank would do the same. Source: moe.md 6. Off, or without findings, training is bit for bit the same.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "model/model.h"
#include "optim/optimizer.h"

namespace tessera::train {

struct GuardOptions {
  bool on = true;
  bool revive = true;        // re-initialise dead experts; off: only report
  int64_t window = 100;      // W, steps
  int64_t grace = 500;       // first steps that are not judged
  int64_t audit = 1000;      // steps between full records
  int64_t max_revivals = 3;  // of one expert; then only the alarm
  uint64_t seed = 1;
};

struct GuardEvent {
  int64_t step = 0;   // steps done
  int64_t layer = 0;  // 1-based
  std::string what;   // "warn", "cold", "dead", "revived", "alarm", "audit"
  std::vector<int64_t> experts;
  std::string detail;                                                // what was found and what can be done, for people
  std::vector<std::pair<std::string, std::vector<double>>> vectors;  // of an audit: one value an expert
};

class Guard {
 public:
  Guard(const model::Model& model, GuardOptions options);

  // Adds the counters and gradients of one step; call before they are cleared.
  void observe(const std::vector<ops::router::Counters>& counters, const model::Weights& weights);
  // At the end of a window judges it and acts on weights, biases and optimizer state. `step`: steps done.
  // `decaying`: the final decay phase, where nothing is re-initialised.
  std::vector<GuardEvent> act(int64_t step, bool decaying, const model::Weights& weights, optim::Optimizer& optimizer);

  std::string state() const;  // JSON; restoring it gives the same actions as never having stopped
  void restore(const std::string& json);

 private:
  struct Expert {
    double load = 0, weight = 0, by_bias = 0, gradient = 0;  // sums over the running window; gradient: of squares
    int64_t cold_windows = 0, dead_windows = 0, worthless_windows = 0, revivals = 0;
  };
  struct Layer {
    int64_t layer = 0;  // 0-based
    std::vector<Expert> experts;
    int64_t uneven_steps = 0;  // in a row with MaxVio above five sampling floors
  };
  struct Signals {  // of one layer over a window, one value an expert
    std::vector<double> u, omega, rho, gn;
    double entropy = 1;  // of the load, over ln E
  };
  Signals signals(const Layer& layer) const;
  void judge(Layer& layer, const Signals& s, GuardEvent base, const View& bias, std::vector<GuardEvent>& events,
             std::vector<int64_t>& dead) const;
  void revive(Layer& layer, int64_t expert, const Signals& s, int64_t step, const model::Weights& weights,
              optim::Optimizer& optimizer) const;

  const model::Model* model_;
  GuardOptions options_;
  std::vector<Layer> layers_;
  int64_t steps_ = 0;  // in the running window
};

}  // namespace tessera::train
