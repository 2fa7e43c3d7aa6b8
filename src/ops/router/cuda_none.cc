#include "ops/router/cuda.h"

namespace tessera::ops::router::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&) { gpu::require(); }
void backward(GpuStream, const Dims&, const Outputs&, const OutputGrads&, const Grads&) { gpu::require(); }
void count(GpuStream, const Dims&, const Inputs&, const Outputs&, const BalanceOptions&, const Counters&,
           const CountWorkspace&) {
  gpu::require();
}
void forward(GpuStream, const z_loss::Dims&, const z_loss::Inputs&, const z_loss::Outputs&) { gpu::require(); }
void backward(GpuStream, const z_loss::Dims&, const z_loss::Inputs&, double, const z_loss::Grads&) { gpu::require(); }

}  // namespace tessera::ops::router::cuda
