#pragma once

#include "ops/rms_norm/op.h"

namespace tessera::ops::rms_norm::cuda {

inline constexpr int64_t kPartials = 264;   // blocks of the backward, each with its own sum of weight gradients
inline constexpr int64_t kMaxWidth = 8192;  // a row lies in the registers of one block

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
              const View& partials);  // (kPartials, W) f32

}  // namespace tessera::ops::rms_norm::cuda
