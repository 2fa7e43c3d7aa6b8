// Attention on the tensor cores of sm_90, for heads of the large models' widths (has_sm90_kernels) in bf16; everything
// else goes to the portable kernels, which are the oracle too.
#pragma once

#include "ops/mla/cuda/tiles.h"

namespace tessera::ops::mla::cuda::sm90 {

inline constexpr int kNope = 128, kRope = 64, kKey = kNope + kRope, kValue = 128;

// Whether addresses and strides suit the copy engine, too.
bool takes(const Dims&, const Inputs&);
bool takes(const Dims&, const Inputs&, const OutputGrads&);

void forward(GpuStream, const Dims&, const Inputs&, const Arguments&);
// dq, dkv and each head's part of dk_shared.
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Arguments&, const BackwardWorkspace&);

}  // namespace tessera::ops::mla::cuda::sm90
