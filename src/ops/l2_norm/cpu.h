#pragma once

#include "ops/l2_norm/op.h"

namespace tessera::ops::l2_norm::cpu {

void forward(const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(const Dims&, const Outputs&, const Saved&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::l2_norm::cpu
