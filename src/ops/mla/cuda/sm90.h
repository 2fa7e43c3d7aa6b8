// Attention on the tensor cores of sm_90, for heads of the large models' widths; everything else goes to the portable
// kernels, which are the oracle too.
#pragma once

#include "ops/mla/cuda.h"

namespace tessera::ops::mla::cuda::sm90 {

inline constexpr int kNopeDim = 128, kRopeDim = 64, kKeyDim = kNopeDim + kRopeDim, kValueDim = 128;

bool takes(const Dims&, const Inputs&);  // those widths, bf16, addresses and strides the copy engine can use
void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*);

}  // namespace tessera::ops::mla::cuda::sm90
