// The global gradient norm, sqrt(sum of g^2 over all slots): products and sums in float64, the same bits for any number
// of threads. On the GPU the sum is taken there and one number copied, which waits for the backward pass. NaN or
// infinity anywhere makes it not finite, which is how a step learns of it: float32 squares cannot overflow float64.
#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

Costs gradient_norm_costs(std::span<const Slot>, Device back_end = Device::cpu);
double gradient_norm(Context&, std::span<const Slot>);  // 0 on dry

}  // namespace tessera::optim
