#include "ops/kda/cuda.h"

namespace tessera::ops::kda::cuda {

void fill_lists(GpuStream, const Documents&, const Plan&, const Workspace&) { gpu::require(); }
void prepare(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&) { gpu::require(); }
void scan(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&, const ScanOutputs&) { gpu::require(); }
void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Plan&, const Workspace&) { gpu::require(); }
void state_map(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&, const StateMap&) {
  gpu::require();
}
void state_gradient_map(GpuStream, const Dims&, const Inputs&, const View&, const Plan&, const Workspace&,
                        const View&) {
  gpu::require();
}
void fold(GpuStream, const StateMap&, Pass, const View&) { gpu::require(); }
void step(GpuStream, const Dims&, const Inputs&, const View&, const View&) { gpu::require(); }

}  // namespace tessera::ops::kda::cuda
