#pragma once

#include "ops/router/balance.h"
#include "ops/router/op.h"
#include "ops/router/z_loss.h"

namespace tessera::ops::router::cuda {

inline constexpr int64_t kMaxExperts = 1024;  // a row of scores lies in the registers of one warp
inline constexpr int64_t kMaxBins = 7000;     // the counts of 8 experts lie in the shared memory of a block
inline constexpr int64_t kParts = 264;        // of the tokens, each with its own sum of weights

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&);
void backward(GpuStream, const Dims&, const Outputs&, const OutputGrads&, const Grads&);

struct CountWorkspace {
  View row_scale;  // (T, 2) f32: softmax's max and inverse sum of each row; absent for sigmoid
  View by_bias;    // (T, k) u8: the slot's expert is not among the k best of s
  View weights;    // (kParts, E) f64: sum of p of each part
};
void count(GpuStream, const Dims&, const Inputs&, const Outputs&, const BalanceOptions&, const Counters&,
           const CountWorkspace&);

void forward(GpuStream, const z_loss::Dims&, const z_loss::Inputs&, const z_loss::Outputs&);
void backward(GpuStream, const z_loss::Dims&, const z_loss::Inputs&, double scale, const z_loss::Grads&);

}  // namespace tessera::ops::router::cuda
