#include "ops/glu/cuda.h"

namespace tessera::ops::glu::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&) { gpu::require(); }
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&) { gpu::require(); }

}  // namespace tessera::ops::glu::cuda
