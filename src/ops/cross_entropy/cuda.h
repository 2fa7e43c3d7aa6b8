#pragma once

#include "ops/cross_entropy/op.h"

namespace tessera::ops::cross_entropy::cuda {

struct Workspace {
  View logits;  // (min(block_rows, T), vocabulary) f32; the gradient of the logits takes their place, in the type of x
  View products;  // gemm_workspace()
};

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Workspace&);
void forward_backward(GpuStream, const Dims&, const Inputs&, double scale, const Outputs&, const Grads&,
                      const Workspace&);

}  // namespace tessera::ops::cross_entropy::cuda
