#include "ops/gemm/cuda.h"

namespace tessera::ops {

GpuOperand operand(const View& view) {
  TESSERA_CHECK(view.memory() == Memory::gpu, "operand {} of a GPU product lies in host memory",
                view.shape().to_string());
  TESSERA_CHECK(view.rank() == 2 || view.rank() == 3, "operand {} of a GPU product, wanted a matrix or a stack of them",
                view.shape().to_string());
  if (view.rank() == 2) return {view.data(), view.dtype(), view.row_stride(), 0};
  return {view.data(), view.dtype(), view.dim(2), view.row_stride()};
}

}  // namespace tessera::ops
