#pragma once

#include "ops/short_conv/op.h"

namespace tessera::ops::short_conv::cuda {

inline constexpr int64_t kPartials = 64;  // ranges of tokens in the backward, each with its own sum of weight gradients

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&);
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&,
              const View& partials);  // (kPartials, W, G) f32

}  // namespace tessera::ops::short_conv::cuda
