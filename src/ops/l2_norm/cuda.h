#pragma once

#include "ops/l2_norm/op.h"

namespace tessera::ops::l2_norm::cuda {

inline constexpr int64_t kMaxWidth = 1024;  // a row lies in the registers of one warp

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(GpuStream, const Dims&, const Outputs&, const Saved&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::l2_norm::cuda
