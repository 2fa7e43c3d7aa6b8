// What the backward kernels add to tiles.cuh: BF16 products, transpositions between lanes, rows written whole.
#pragma once

#include "ops/kda/cuda/tiles.cuh"

namespace tessera::ops::kda::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Fragments as those of mma_f16.
__device__ inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit elements, (g, 2t..) in each lane: (g, 2t..) of its transpose.
__device__ inline uint32_t transpose_matrix(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// Word i of lane t becomes word t of lane i, in each group of four lanes.
__device__ inline void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? other : w[i];
    w[i + 1] = odd ? w[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, high ? w[i] : w[i + 2], 2);
    w[i] = high ? other : w[i];
    w[i + 2] = high ? w[i + 2] : other;
  }
}
__device__ inline void store_words(void* to, const uint32_t (&w)[4]) {
  *static_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
}

}  // namespace tessera::ops::kda::cuda
