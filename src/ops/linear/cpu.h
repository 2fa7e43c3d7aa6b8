#pragma once

#include "ops/linear/op.h"

namespace tessera::ops::linear::cpu {

void forward(const Dims&, const Inputs&, const Outputs&, Product, const View& scratch);
void backward(const Dims&, const Inputs&, const OutputGrads&, const Grads&, Product, const View& scratch);

}  // namespace tessera::ops::linear::cpu
