// The attention backward for heads of 128 + 64 / 128 on sm_90 (backward_sm90.cu).
#pragma once

#include "ops/mla/cuda/tiles.h"

namespace tessera::ops::mla::cuda::sm90 {

bool takes(const Dims&, const Inputs&, const OutputGrads&);

// dq, dkv and each head's part of dk_shared.
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Arguments&, const BackwardWorkspace&);

}  // namespace tessera::ops::mla::cuda::sm90
