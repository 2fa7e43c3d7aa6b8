#pragma once

#include "ops/glu/op.h"

namespace tessera::ops::glu::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&);
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::glu::cuda
