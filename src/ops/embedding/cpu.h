#pragma once

#include "ops/embedding/op.h"

namespace tessera::ops::embedding::cpu {

void forward(const Dims&, const Inputs&, const Outputs&);
void backward(const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::embedding::cpu
