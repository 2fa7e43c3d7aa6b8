#include "ops/elementwise/cuda.h"

namespace tessera::ops::elementwise::cuda {

void add(GpuStream, const View&, const View&, const View&) { gpu::require(); }
void square_sums(GpuStream, const View&, const View&) { gpu::require(); }

}  // namespace tessera::ops::elementwise::cuda
