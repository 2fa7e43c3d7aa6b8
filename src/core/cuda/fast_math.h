// Elementary functions of kernels bound by memory, beside core/fast_math.h of the CPU: exp, reciprocal, sigmoid.
//
// At the full bandwidth of an H200 a bf16 element that is read and written leaves time for some 40 instructions, so
// each of these is one special-function instruction and a multiplication. exp(x) is within 2 + 1.2 |x| ulp (the
// rounding of x / ln 2 grows with x; where that is large, exp is far below the 1 that it is added to), the reciprocal
// within 1. Results below 2^-126 become 0; limits at +-infinity are exact and a NaN stays one.
#pragma once

namespace tessera::cuda {

__device__ inline float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sigmoid(x) and 1 - sigmoid(x), from exp(-|x|) so that both tails keep their relative accuracy.
struct Sigmoid {
  float value, complement;
};
__device__ inline Sigmoid fast_sigmoid(float x) {
  const float e = fast_exp(-fabsf(x)), near_one = fast_reciprocal(1.0f + e), near_zero = e * near_one;
  return x < 0.0f ? Sigmoid{near_zero, near_one} : Sigmoid{near_one, near_zero};
}

}  // namespace tessera::cuda
