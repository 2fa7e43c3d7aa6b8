// QK-Clip for multi-head latent attention: after the optimiser step, heads whose largest attention logit S_h passed the
// threshold tau get smaller query and key projections, so that the same inputs give logits gamma times as large:
//
//   gamma_h = min(1, tau / S_h);   Wq_nope_h, Wk_nope_h *= sqrt(gamma_h),   Wq_pe_h *= gamma_h
//
// The key shared by all heads stays: its share of the logit shrinks through the query alone. Values and momenta stay.
// Source: moe.md 7.4. Not for KDA heads, whose queries and keys are normalised.
#pragma once

#include <span>

#include "core/context.h"

namespace tessera::optim {

struct QkClip {
  int64_t heads, nope_dim, rope_dim, value_dim;  // H, d_n, d_p, d_v
  double threshold = 100;                        // tau
};

struct QkClipLayer {
  View max_logit;  // (H): over every micro-batch and rank of the step; -inf for a head that saw no token
  View q_proj;     // (H (d_n + d_p), q_inputs), any row stride; scaled in place
  View kv_b;       // (H (d_n + d_v), kv_inputs), any row stride; scaled in place
  View q_copy = {}, kv_copy = {};  // the same in bf16, on a GPU: rounded anew where the master is scaled; may be absent
};

Costs qk_clip_costs(const QkClip&, std::span<const QkClipLayer>, Device back_end = Device::cpu);

// Returns the number of heads clipped (0 on dry). Error where a largest logit is NaN or +inf: that layer is left as it
// is. On the GPU one copy at the end tells, for all layers.
int64_t qk_clip(Context&, const QkClip&, std::span<const QkClipLayer>);

}  // namespace tessera::optim
