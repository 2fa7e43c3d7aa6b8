#include "ops/attn_res/cuda.h"

namespace tessera::ops::attn_res::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*) { gpu::require(); }
void backward(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&, const View&) {
  gpu::require();
}

}  // namespace tessera::ops::attn_res::cuda
