// The optimiser: Muon for hidden matrices, AdamW for everything else, one learning rate for both, gradients clipped by
// their global norm.
//
// A step measures the norm (float64, in an order that no thread count changes), then updates every slot; the clip
// scale multiplies gradients as they are read, so gradients are never written. Rates come from the caller: the
// optimiser has no counter, and its state is its momenta. Source: moe.md 7.1-7.3 and 8.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/context.h"

namespace tessera::optim {

enum class Rule : uint8_t { muon, adamw };

struct Slot {            // one parameter as the optimizer sees it
  std::string name;      // logical name; state tensors are named after it
  View value, gradient;  // same shape, contiguous; f32 (f64 in proofs, on a CPU), the same for all slots
  Rule rule;
  int64_t blocks = 1;       // equal parts along the leading axis: experts, or heads cut along rows; Muon
                            // orthogonalises each alone, and reset_block() clears one
  double weight_decay = 0;  // decoupled: value -= learning_rate * weight_decay * value
  bool decay_idle = true;  // false (Muon): a block whose gradient is all zero, an expert without tokens, does not decay
  View copy = {};          // bf16, like the value, on a GPU: what ops read; rounded anew from every new value
  int64_t first_row = 0;   // where only a part of the parameter is this process's (parts.h): rows before it
};

struct Options {
  double momentum = 0.95;  // Muon
  bool nesterov = true;
  int64_t newton_schulz_steps = 5;
  double beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;  // AdamW
  double clip_norm = 1.0;                            // 0: off
};

struct StepReport {
  double gradient_norm;  // before clipping
  double clip_scale;     // min(1, clip_norm / gradient_norm)
  bool finite;           // false: a gradient held NaN or infinity, and the step changed nothing
};

// What a rule remembers of one slot: Muon its momentum (second is absent), AdamW both moments. Shapes of the value.
struct Moments {
  View first, second;
};

class Optimizer {
 public:
  Optimizer(std::vector<Slot> slots, Options options);  // UserError: options out of range; Error: slots that cannot be

  void allocate_state(Context&);         // momenta from the arena, zeroed (dry: offsets only)
  double gradient_norm(Context&) const;  // of the slots; 0 on dry
  // `step` counts from 0; Adam's bias correction uses step + 1. `gradient_norm` is that of all slots, also of those
  // that other processes own; not finite: nothing changes.
  StepReport step(Context&, double learning_rate, int64_t step, double gradient_norm);
  StepReport step(Context& ctx, double learning_rate, int64_t number) {
    return step(ctx, learning_rate, number, gradient_norm(ctx));
  }

  struct StateTensor {
    std::string name, parameter;  // that of the slot
    View view;
    int64_t first_row;
  };
  std::vector<StateTensor> state() const;  // "muon.momentum.<name>", "adam.m.<name>", "adam.v.<name>"

  // Zeroes momentum or moments of one block, counted in the whole parameter, for the collapse guard; nothing where
  // another process owns it. Adam's
  // correction goes on with the global step: the block's next updates are (1 - beta1^n) / sqrt(1 - beta2^n) of the
  // corrected ones, 0.45 growing to 1.
  void reset_block(std::string_view name, int64_t block);

  // One step of all slots: sums, but for the workspace, which is the largest at any time and grows with thread_count()
  // (Muon holds one matrix a thread; on the GPU one batch). Newton-Schulz counts whole products, though half of the
  // symmetric ones is skipped.
  static Costs costs(std::span<const Slot>, const Options&, Device back_end = Device::cpu);

  const std::vector<Slot>& slots() const { return slots_; }

 private:
  std::vector<Slot> slots_;
  Options options_;
  std::vector<Moments> moments_;  // one a slot; empty before allocate_state()
};

}  // namespace tessera::optim
