#include "ops/linear/cuda.h"

namespace tessera::ops::linear::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Workspace&) { gpu::require(); }
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Workspace&) {
  gpu::require();
}

}  // namespace tessera::ops::linear::cuda
