#pragma once

#include "ops/sigmoid_gate/op.h"

namespace tessera::ops::sigmoid_gate::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&);
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::sigmoid_gate::cuda
