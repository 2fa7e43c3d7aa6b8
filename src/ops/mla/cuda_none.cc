#include "ops/mla/cuda.h"

namespace tessera::ops::mla::cuda {

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*) { gpu::require(); }
void backward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Saved&, const OutputGrads&, const Grads&,
              const BackwardWorkspace&) {
  gpu::require();
}
void decode(GpuStream, const Dims&, const DecodeInputs&, const View&, const DecodeWorkspace&) { gpu::require(); }

}  // namespace tessera::ops::mla::cuda
