#include "ops/l2_norm/cuda.h"

namespace tessera::ops::l2_norm::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*) { gpu::require(); }
void backward(GpuStream, const Dims&, const Outputs&, const Saved&, const OutputGrads&, const Grads&) {
  gpu::require();
}

}  // namespace tessera::ops::l2_norm::cuda
