// A warp and its row: element j of E lies in lane j % 32, place j / 32 of N. Scores of one row, the same in routing and
// in counting. Full-precision exponentials: selection compares scores that differ in the third decimal and beyond.
#pragma once

#include "core/cuda/kernel.h"
#include "ops/router/cuda.h"

namespace tessera::ops::router::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

struct Scale {
  float max = 0, inverse_sum = 1;  // softmax only
};

__device__ inline float score_of(bool softmax, float z, Scale row) {
  if (softmax) return expf(z - row.max) * row.inverse_sum;
  const float e = expf(-fabsf(z));
  return (z < 0.0f ? e : 1.0f) / (1.0f + e);
}

template <int N>
__device__ void load_row(const float* row, int experts, int lane, float (&z)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) z[i] = lane + 32 * i < experts ? row[lane + 32 * i] : 0.0f;
}

template <int N>
__device__ Scale softmax_scale(const float (&z)[N], int experts, int lane) {
  float max = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (lane + 32 * i < experts) max = fmaxf(max, z[i]);
  }
  max = tessera::cuda::warp_max(max);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (lane + 32 * i < experts) sum += expf(z[i] - max);
  }
  return {max, 1 / tessera::cuda::warp_sum(sum)};
}

// Integers in the order of the floats; -0 is made 0, so that equal floats have equal keys. 0 lies below every key.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ inline float of_key(uint32_t key) { return __uint_as_float((key >> 31) != 0 ? key & 0x7fffffffu : ~key); }

// Calls f<N>() with the number of places of E experts.
template <class F>
void choose_places(int64_t experts, F&& f) {
  TESSERA_CHECK(experts <= kMaxExperts, "router of {} experts on the GPU; at most {}", experts, kMaxExperts);
  if (experts <= 32) return f.template operator()<1>();
  if (experts <= 64) return f.template operator()<2>();
  if (experts <= 128) return f.template operator()<4>();
  if (experts <= 256) return f.template operator()<8>();
  if (experts <= 512) return f.template operator()<16>();
  f.template operator()<32>();
}

}  // namespace tessera::ops::router::cuda
