// AdamW with decoupled weight decay, one fused pass over value, gradient and both moments. With t = step + 1 and g the
// clipped gradient:
//   m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
//   w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
#pragma once

#include "optim/optimizer.h"

namespace tessera::optim::adamw {

template <class Real>
struct Factors {  // of one step, for every element
  Real gradient_scale, keep1, add1, keep2, add2, correction2, epsilon, rate;
};

Costs costs(std::span<const Slot>);  // of the slots with Rule::adamw; the others are passed over, here and in step()
void step(Context&, std::span<const Slot>, std::span<const Moments>, const Options&, double learning_rate,
          double gradient_scale, int64_t step);

}  // namespace tessera::optim::adamw
