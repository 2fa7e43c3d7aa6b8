#include "optim/cuda.h"

namespace tessera::optim::cuda {

void sum_of_squares(GpuStream, std::span<const Slot>, const View&, const View&) { gpu::require(); }
void adamw(GpuStream, std::span<const Slot>, std::span<const Moments>, const adamw::Factors<float>&, double) {
  gpu::require();
}
void muon(GpuStream, std::span<const Slot>, std::span<const Moments>, const Batch&, const Options&, double, double,
          const BatchWorkspace&) {
  gpu::require();
}
void qk_clip(GpuStream, const QkClip&, const QkClipLayer&, const View&, const View&) { gpu::require(); }

}  // namespace tessera::optim::cuda
