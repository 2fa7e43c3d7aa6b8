#include "ops/router/cuda.h"

namespace tessera::ops::router::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&) { gpu::require(); }
void backward(GpuStream, const Dims&, const Outputs&, const OutputGrads&, const Grads&) { gpu::require(); }
void count(GpuStream, const Dims&, const Inputs&, const Outputs&, const BalanceOptions&, const Counters&,
           const CountWorkspace&) {
  gpu::require();
}

}  // namespace tessera::ops::router::cuda
