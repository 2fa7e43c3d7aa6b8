#include "ops/short_conv/cuda.h"

namespace tessera::ops::short_conv::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&) { gpu::require(); }
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const View&) { gpu::require(); }

}  // namespace tessera::ops::short_conv::cuda
