#pragma once

#include "ops/glu/op.h"

namespace tessera::ops::glu::cpu {

void forward(const Dims&, const Inputs&, const Outputs&);
void backward(const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::glu::cpu
