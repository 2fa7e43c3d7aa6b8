#pragma once

#include "ops/attn_res/op.h"

namespace tessera::ops::attn_res::cpu {

// Gradients of query and gain are summed over this many fixed ranges of tokens, then over the ranges in order: the same
// bits for any number of threads.
inline constexpr int64_t kPartials = 16;

// `folded` (D) receives q = gain o query, the only form in which the two act on a token.
void forward(const Dims&, const Inputs&, const Outputs&, Saved*, const View& folded);
void backward(const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&, const View& folded,
              const View& partials);

}  // namespace tessera::ops::attn_res::cpu
