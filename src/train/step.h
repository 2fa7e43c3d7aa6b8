// One optimisation step: its storage, its gradients, its update. The order is moe.md 8:
//
//   for each micro-batch: forward, backward -> finite check, clip -> Muon and AdamW -> QK-clip -> balance the routers
//
// Among several processes (model.mesh()) each accumulates its own micro-batches; finish() sums gradients and counts
// over everyone first, and all of them come out of it with the same weights.
//
// The same class runs dry: on a dry context it takes the same memory and charges the same costs, which is the plan.
#pragma once

#include <optional>

#include "train/guard.h"
#include "train/ownership.h"
#include "train/pipeline.h"
#include "train/run_config.h"

namespace tessera::train {

struct StepReport {
  double gradient_norm = 0;
  double clip_scale = 1;
  bool finite = true;                               // false: the step changed nothing
  int64_t heads_clipped = 0;                        // QK-clip
  std::vector<ops::router::BalanceReport> balance;  // one a MoE layer
  std::vector<int64_t> blind_routers;               // layers, from 1, whose router met NaN or infinity: not finite

  std::string refusal() const;  // why nothing was changed, for people; empty: it was
};

// What lies in this process of a published tensor: all of it, but for the optimizer's share of several processes, and
// for tensors that are cut among them.
struct Piece {
  std::string name;
  Shape whole;
  int64_t first_row = 0;
  View view;
  bool saved = true;  // this process writes it; the others hold the same
  int64_t first_column = 0;
};

class Stepper {
 public:
  // Takes parameters, gradients, optimizer state, counters and batch buffers from the arena.
  Stepper(Context& ctx, const model::Model& model, const RunConfig& run);

  void initialise(uint64_t seed);  // the weights of a new run, the same on every device

  // Gradients of one micro-batch are added to those of the step: `loss_tokens` is the count of the whole step.
  // Returns the sum of the batch's losses, nats (0 on dry).
  double accumulate(Context& ctx, const model::Batch& batch, int64_t loss_tokens);
  // The same of all micro-batches that this process takes part in; in a pipeline, where each is whole nowhere, the only
  // way. Then the process of the last chunk has their losses, others 0. On dry they may be examples of the step's.
  double accumulate(Context& ctx, std::span<const MicroBatch> batches, int64_t loss_tokens);
  // `guard` (may be null) sees the counters and gradients of a finite step before they are cleared.
  StepReport finish(Context& ctx, double learning_rate, int64_t step, Guard* guard = nullptr);
  // How the routers are trained from the next step on, one a MoE layer: the guard's word, between steps. A layer that
  // counts in another way than before starts at zero.
  void set_routers(const std::vector<model::RouterOptions>& routers);

  const model::Model& model() const { return model_; }
  const model::Weights& weights() const { return weights_; }
  optim::Optimizer& optimizer() { return optimizer_; }
  const std::vector<ops::router::Counters>& counters() const { return record_.counters; }
  const std::vector<model::RouterOptions>& routers() const { return record_.routers; }
  int64_t static_bytes() const { return static_bytes_; }

  // One micro-batch of at most `micro_tokens` in the buffers of the device, or this process's part of it where its
  // tokens are cut along the context axis. `offsets` must outlive it; ids and targets may be null on dry.
  model::Batch place(Context& ctx, const int32_t* ids, const int32_t* targets, std::span<const int64_t> offsets) const;

  // What this process keeps of everything a checkpoint holds, under published names; optimizer state as
  // "<rule>.<moment>.<name>".
  std::vector<Piece> state() const;
  // The part of it named "balance.<layer>.<what>": counts of layers that have yet to see enough tokens to move their
  // bias, else zero. Its shapes follow the routers' options.
  std::vector<model::NamedView> pending_counts() const;

 private:
  std::vector<Ownership::Shared> slots(const RunConfig& run) const;
  model::Batch place_tokens(Context& ctx, const int32_t* ids, const int32_t* targets,
                            std::span<const int64_t> offsets) const;
  optim::StepReport update(Context& ctx, double learning_rate, int64_t step);
  std::vector<Piece> optimizer_pieces() const;
  std::vector<int64_t> blind_routers() const;
  std::vector<ops::router::BalanceReport> balance_routers(bool finite) const;
  int64_t clip_heads(Context& ctx) const;
  const model::Model& model_;
  const RunConfig& run_;
  model::Weights weights_;
  Ownership ownership_;
  optim::Optimizer optimizer_;
  model::StepRecord record_;
  std::optional<Pipeline> pipeline_;  // none: whole models, one micro-batch after the other
  View ids_, targets_, losses_;       // of one micro-batch
  View offsets_;                      // of its documents, on the GPU
  int64_t static_bytes_ = 0;
};

}  // namespace tessera::train
