// Router z-loss: pulls the logits of a router towards small values, so that its scores leave saturation.
//
//   loss_i = lse_i^2,   dL/dz_ij = 2 lse_i softmax(z_i)_j,   lse_i = log(sum over j of exp(z_ij))
//
// A remedy of the collapse guard (moe.md 6, rung 3): training without it never runs this op. The logits are not saved
// by the router, so backward takes them again. Rows with a non-finite logit have no loss, as they have no routing.
#pragma once

#include "core/context.h"

namespace tessera::ops::router::z_loss {

struct Dims {
  int64_t tokens, experts;  // T, E
};
// All tensors are exact_type of the activations: float32 beside bf16.
struct Inputs {
  View logits;  // (T, E)
};
struct Outputs {
  View loss;  // (T); 0 in invalid rows
};
struct Grads {
  View logits;  // (T, E); added to, for the router's own gradient lies there already
};

Costs costs(const Dims&, DType, Pass);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
// Gradient of `scale` times the sum of all losses.
void backward(Context&, const Dims&, const Inputs&, double scale, const Grads&);

}  // namespace tessera::ops::router::z_loss
