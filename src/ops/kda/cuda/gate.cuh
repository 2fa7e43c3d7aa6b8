// The decay gate and beta on the GPU, with the decay in base 2: what is exponentiated is g log2(e).
#pragma once

#include "core/cuda/kernel.h"
#include "ops/kda/op.h"

namespace tessera::ops::kda::cuda {

inline constexpr float kLog2E = 1.44269504088896340736f;

__device__ inline float exp2_fast(float x) {  // 2 ulp; 0 below 2^-126
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(A_log), at most the root of the largest number: a x stays a number, and 0 times it is 0.
__device__ inline float gate_rate(const float* a_log, int head) {
  return a_log == nullptr ? 1.0f : fminf(expf(a_log[head]), 1.8446743e19f);
}

// Below this e^g is 0 even as a subnormal: the floor changes no decay, and keeps the spacing of sums of gates small.
inline constexpr float kLeastLog2Gate = -160;

// g log2(e), from x = z + dt_bias and a = exp(A_log).
template <Gate kGate>
__device__ float log2_gate(float x, float a, float lower_bound) {
  if constexpr (kGate == Gate::bounded) {
    const float u = a * x, e = exp2_fast(-kLog2E * fabsf(u)), d = __fdividef(1.0f, 1.0f + e);
    return kLog2E * lower_bound * (u < 0 ? e * d : d);
  } else {
    const float softplus = fmaxf(x, 0.0f) + log1pf(exp2_fast(-kLog2E * fabsf(x)));
    return fmaxf(-kLog2E * a * softplus, kLeastLog2Gate);
  }
}

// `bound` is 1, or 2 where negative eigenvalues are allowed.
__device__ inline float beta_of(float logit, float bound) {
  return __fdividef(bound, 1.0f + exp2_fast(-kLog2E * logit));
}

}  // namespace tessera::ops::kda::cuda
