#pragma once

#include "ops/rms_norm/op.h"

namespace tessera::ops::rms_norm::cpu {

// The weight gradient is summed over this many fixed ranges of rows, then over the ranges in order: the same bits for
// any number of threads.
inline constexpr int64_t kPartials = 16;

void forward(const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&, const View& partials);

}  // namespace tessera::ops::rms_norm::cpu
