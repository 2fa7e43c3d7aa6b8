// What is common to the rows of accumulators, whose layout is the same for the warp's products and the warp group's:
// four neighbouring threads share a row.
#pragma once

#include "core/cuda/kernel.h"

namespace tessera::ops::mla::cuda {

__device__ inline float over_row(float x, bool maximum) {  // of the four threads that share rows
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = maximum ? fmaxf(x, other) : x + other;
  }
  return x;
}

// *to = max(*to, value), in whatever order.
__device__ inline void raise(float* to, float value) {  // the order of floats of one sign is that of their bits
  value += 0.0f;                                        // -0 has the bits of a negative number
  if (value >= 0) {
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
  }
}

}  // namespace tessera::ops::mla::cuda
