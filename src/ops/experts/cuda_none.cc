#include "ops/experts/cuda.h"

namespace tessera::ops::experts::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Saved&, const ForwardWorkspace&) {
  gpu::require();
}
void backward(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
              const BackwardWorkspace&) {
  gpu::require();
}

void repeat_forward_products(GpuStream, const Dims&, const Inputs&, const Saved&, const ForwardWorkspace&, int) {
  gpu::require();
}
void repeat_backward_products(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
                              const BackwardWorkspace&, int) {
  gpu::require();
}

}  // namespace tessera::ops::experts::cuda
