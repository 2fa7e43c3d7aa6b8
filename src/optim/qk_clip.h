// QK-Clip for multi-head latent attention: after the optimiser step, heads whose largest attention logit S_h passed the
// threshold tau get smaller query and key projections, so that the same inputs give logits gamma times as large:
//
//   gamma_h = min(1, tau / S_h);   Wq_nope_h, Wk_nope_h *= sqrt(gamma_h),   Wq_pe_h *= gamma_h
//
// The key shared by all heads stays: its share of the logit shrinks through the query alone. Values and momenta stay.
// Source: moe.md 7.4. Not for KDA heads, whose queries and keys are normalised.
#pragma once

#include "core/context.h"

namespace tessera::optim {

struct QkClip {
  int64_t heads, nope_dim, rope_dim, value_dim;  // H, d_n, d_p, d_v
  double threshold = 100;                        // tau
};

Costs qk_clip_costs(const QkClip&, DType, int64_t q_inputs, int64_t kv_inputs);

// max_logit (H): over every micro-batch and rank of the step; -inf for a head that saw no token, never NaN or +inf.
// q_proj (H (d_n + d_p), q_inputs) and kv_b (H (d_n + d_v), kv_inputs), any row stride: scaled in place.
// Returns the number of heads clipped (0 on dry).
int64_t qk_clip(Context&, const QkClip&, const View& max_logit, const View& q_proj, const View& kv_b);

}  // namespace tessera::optim
