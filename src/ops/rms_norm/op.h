// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, over the last index.
//
// Source: moe.md 3.2 (backward); the model's block norms, the latent norm of MLA, the per-head output norm of KDA
// (rows are tokens x heads there, one weight shared by all) and the stabiliser of LatentMoE.
#pragma once

#include "core/context.h"

namespace tessera::ops::rms_norm {

struct Dims {
  int64_t rows, width;  // (R, W)
  double eps;
};
struct Inputs {
  View x;       // (R, W), any row stride
  View weight;  // (W), exact_type
};
struct Outputs {
  View y;  // (R, W), any row stride
};
struct Saved {
  View rstd;  // (R), exact_type: 1 / sqrt(mean(x^2) + eps)
};
struct OutputGrads {
  View y;  // (R, W), any row stride
};
struct Grads {
  View x;       // (R, W), any row stride; overwritten. May be the same memory as OutputGrads::y.
  View weight;  // (W), exact_type; added to
};

Costs costs(const Dims&, DType, Pass, Device back_end = Device::cpu);
Saved allocate_saved(Context&, const Dims&, DType);

void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);  // Saved null: inference
void backward(Context&, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::rms_norm
