#include "ops/cross_entropy/cuda.h"

namespace tessera::ops::cross_entropy::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Workspace&) { gpu::require(); }
void forward_backward(GpuStream, const Dims&, const Inputs&, double, const Outputs&, const Grads&, const Workspace&) {
  gpu::require();
}

}  // namespace tessera::ops::cross_entropy::cuda
