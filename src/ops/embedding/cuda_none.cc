#include "ops/embedding/cuda.h"

namespace tessera::ops::embedding::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&) { gpu::require(); }
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Workspace&) {
  gpu::require();
}

}  // namespace tessera::ops::embedding::cuda
