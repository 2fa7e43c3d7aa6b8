#include "ops/kda/cuda_backward.h"

namespace tessera::ops::kda::cuda {

void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Plan&, const Workspace&,
              const BackwardWorkspace&) {
  gpu::require();
}

}  // namespace tessera::ops::kda::cuda
