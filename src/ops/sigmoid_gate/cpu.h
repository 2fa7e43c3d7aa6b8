#pragma once

#include "ops/sigmoid_gate/op.h"

namespace tessera::ops::sigmoid_gate::cpu {

void forward(const Dims&, const Inputs&, const Outputs&);
void backward(const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::sigmoid_gate::cpu
