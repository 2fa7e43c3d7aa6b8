// Collapse guard: quantile balancing makes loads equal, so loads alone cannot show a dead expert; value can.
//
// Over windows of W steps it watches, for each expert, its load u (over the mean), its share omega of the mixing weight
// (1 on average), how often only the bias chose it (rho), and its gradient gn (over the layer's median). It warns,
// and re-initialises dead experts from a strong donor with noise keyed by (seed, layer, expert, step), so that every
// rank would do the same. A layer as a whole can alarm; each alarm is answered by the next rung of a ladder:
//
//   1 centred bins, nothing of the old bias kept    2 twice the bins, a tenth of their width    3 router z-loss
//   4 cold experts are re-initialised as dead ones  5 the run stops and asks
//
// A rung that would change nothing is passed over (1 and 2 are for quantile balancing). Source: moe.md 6. Off, or
// without findings, training is bit for bit the same.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "model/model.h"
#include "optim/optimizer.h"
#include "train/guard_signals.h"

namespace tessera::train {

struct GuardOptions {
  bool on = true;
  bool revive = true;        // re-initialise dead experts; off: only report
  bool escalate = true;      // answer alarms; off: only report
  int64_t window = 100;      // W, steps
  int64_t grace = 500;       // first steps that are not judged
  int64_t audit = 1000;      // steps between full records
  int64_t max_revivals = 3;  // of one expert; then only the alarm
  uint64_t seed = 1;
  model::RouterOptions router = {};  // of every layer before the first rung
};

struct GuardEvent {
  int64_t step = 0;   // steps done
  int64_t layer = 0;  // 1-based
  std::string what;   // "warn", "cold", "dead", "revived", "alarm", "rung", "stop", "audit"
  std::vector<int64_t> experts;
  std::string detail;                                                // what was found and what can be done, for people
  std::vector<std::pair<std::string, std::vector<double>>> vectors;  // of a rung, an audit: one value an expert
};

// "step 300, layer 2: alarm (experts 3, 5): more than 5 % of the experts are cold"
std::string to_text(const GuardEvent&);

// What rung 1, 2 or 3 makes of a router; the same where there is nothing for it to change.
model::RouterOptions with_rung(model::RouterOptions router, int64_t rung);
// All of them: what a memory plan must hold.
model::RouterOptions with_every_rung(model::RouterOptions router);

class Guard {
 public:
  static constexpr int64_t kReviveRung = 4, kStopRung = 5;

  Guard(const model::Model& model, GuardOptions options);

  // Adds the counters (output squares among them) and gradients of one step; call before they are cleared. Among
  // several processes the counters are sums over all, and a gradient is zero but for the one that owns it.
  void observe(Context& ctx, const std::vector<ops::router::Counters>& counters, const model::Weights& weights);
  // At the end of a window judges it and acts on weights, biases and optimizer state. `step`: steps done.
  // `decaying`: the final decay phase, where nothing is re-initialised. The next step must use routers(). The events
  // are those of all layers; in a pipeline each process acts on its own.
  std::vector<GuardEvent> act(int64_t step, bool decaying, const model::Weights& weights, optim::Optimizer& optimizer);
  // One a MoE layer of this process: as the run asks, with the rungs taken.
  std::vector<model::RouterOptions> routers() const;

  std::string state() const;  // JSON, of all layers; restoring it gives the same actions as never having stopped
  void restore(const std::string& json);

 private:
  struct Expert {
    int64_t cold_windows = 0, dead_windows = 0, worthless_windows = 0, revivals = 0;
  };
  struct Layer {
    int64_t layer = 0;               // 0-based
    std::vector<ExpertSums> window;  // the running one
    std::vector<Expert> experts;
    int64_t uneven_steps = 0;    // in a row with MaxVio above 1 and five sampling floors
    std::vector<int64_t> rungs;  // taken, rising
    int64_t settling = 0;        // windows before the next alarm: the last rung is at work
  };
  struct Findings {
    std::vector<int64_t> warned, cold, dead;
    std::string alarm;  // of the layer as a whole; empty: none
  };
  std::vector<double> gradient_squares(Context& ctx, const model::Weights& weights) const;
  Findings judge(Layer& layer, const Signals& s, const View& bias) const;
  int64_t next_rung(const Layer& layer, const Findings& found, bool may_revive) const;
  bool can_be_revived(const Layer& layer, int64_t expert) const;
  model::RouterOptions router_of(const Layer& layer) const;
  GuardEvent take_rung(Layer& layer, int64_t rung, const Findings& found, const Signals& s, GuardEvent event) const;
  void act_on(Layer& layer, bool may_revive, const Signals& s, const GuardEvent& base, const model::Weights& weights,
              optim::Optimizer& optimizer, std::vector<GuardEvent>& events) const;
  void revive(Layer& layer, int64_t expert, int64_t donor, int64_t step, const model::Weights& weights,
              optim::Optimizer& optimizer) const;

  dist::Communicator* pipeline() const;  // null: all layers are here

  const model::Model* model_;
  GuardOptions options_;
  std::vector<Layer> layers_;  // of this process
  int64_t steps_ = 0;          // in the running window
};

}  // namespace tessera::train
