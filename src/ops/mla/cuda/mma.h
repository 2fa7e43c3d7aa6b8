// Tensor core pieces of the attention kernels: products of bf16 with float32 accumulators, m16n8k16, one warp.
//
// A warp holds a (16, 16 N) result as acc[2 N][4]: tile n covers columns [8 n, 8 n + 8); a thread owns rows lane / 4
// and lane / 4 + 8 of it, columns 2 (lane % 4) and the next: [0], [1] of the first row, [2], [3] of the second. Two
// neighbouring tiles rounded to bf16 are exactly the A operand of a product over those 16 columns, so that softmax
// weights go from one product to the next without leaving the registers.
// Tiles in shared memory have rows of `pitch` elements, an odd multiple of 16 bytes: eight rows then lie in different
// banks, and ldmatrix has no conflicts.
#pragma once

#include "core/cuda/kernel.h"

namespace tessera::ops::mla::cuda {

using namespace tessera::cuda;
using bf16 = __nv_bfloat16;
using Fragment = uint32_t[4];  // the A operand of one product (16, 16), or the B operands of two (16, 8)

__host__ __device__ constexpr int pitch_of(int columns) { return columns + 8; }  // columns are a multiple of 16

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void load_matrices(Fragment& f, const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrices_transposed(Fragment& f, const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
               : "r"(shared_address(row))
               : "memory");
}

// A (16, 16): row-major at `tile`.
__device__ inline void load_a(Fragment& f, const bf16* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  load_matrices(f, tile + lane % 16 * pitch + lane / 16 * 8);
}
// B of two tiles of 8 columns, given as its transpose: row-major (16 columns of B, 16) at `tile`.
__device__ inline void load_b_transposed(Fragment& f, const bf16* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  load_matrices(f, tile + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 8);
}
// B of two tiles of 8 columns: row-major (16, 16 columns) at `tile`.
__device__ inline void load_b(Fragment& f, const bf16* tile, int pitch) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(f, tile + lane % 16 * pitch + lane / 16 * 8);
}

__device__ inline void mma(float (&c)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// acc (16, 16 N) += A B^T with A (16, 16 K) in fragments, B (16 N, 16 K) in shared memory.
template <int K, int N>
__device__ void multiply_transposed(float (&acc)[2 * N][4], const Fragment (&a)[K], const bf16* b, int pitch) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Fragment f;
      load_b_transposed(f, b + n * 16 * pitch + k * 16, pitch);
      mma(acc[2 * n], a[k], f[0], f[1]);
      mma(acc[2 * n + 1], a[k], f[2], f[3]);
    }
  }
}
// The same with A in shared memory too, its rows as far apart as those of B.
template <int K, int N>
__device__ void multiply_transposed(float (&acc)[2 * N][4], const bf16* a, const bf16* b, int pitch) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Fragment a_k[1];
    load_a(a_k[0], a + k * 16, pitch);
    multiply_transposed<1, N>(acc, a_k, b + k * 16, pitch);
  }
}
// acc (16, 16 N) += A B with A (16, 16 K) in fragments, B (16 K, 16 N) in shared memory.
template <int K, int N>
__device__ void multiply(float (&acc)[2 * N][4], const Fragment (&a)[K], const bf16* b, int pitch) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Fragment f;
      load_b(f, b + k * 16 * pitch + n * 16, pitch);
      mma(acc[2 * n], a[k], f[0], f[1]);
      mma(acc[2 * n + 1], a[k], f[2], f[3]);
    }
  }
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}
// A result (16, 16 K) as the A operand of the next product.
template <int K>
__device__ void round_to_fragments(Fragment (&a)[K], const float (&x)[2 * K][4]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    a[k][0] = pack(x[2 * k][0], x[2 * k][1]);
    a[k][1] = pack(x[2 * k][2], x[2 * k][3]);
    a[k][2] = pack(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[k][3] = pack(x[2 * k + 1][2], x[2 * k + 1][3]);
  }
}

__device__ inline float exp2_fast(float x) {  // 2^x to 2 ulp, 0 for -inf
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tessera::ops::mla::cuda
