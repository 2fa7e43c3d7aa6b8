#pragma once

#include "ops/linear/op.h"

namespace tessera::ops::linear::cuda {

inline constexpr int64_t kWidenedRows = 8192;  // of x that exist in float32 at a time: a million would take gigabytes

struct Workspace {
  View product;  // gemm_workspace()
  View widened;  // (min(kWidenedRows, T), in) f32; no rows where the types are equal
};

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Workspace&);
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Workspace&);

}  // namespace tessera::ops::linear::cuda
