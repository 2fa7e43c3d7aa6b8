// Tensor-core pieces that the KDA kernels share: products, shared-memory tiles of 16-bit elements, asynchronous copies.
//
// Lane = 4 g + t. Fragments of one warp, rows x columns:
//
//   accumulator 16 x 8 f32        c0, c1 = (g, 2t), (g, 2t + 1)           c2, c3 = the same of row g + 8
//   mma_f16   A 16 x 16           a0 = (g, 2t..), a1 = (g + 8, 2t..), a2 = (g, 2t + 8..), a3 = (g + 8, 2t + 8..)
//             B 16 x 8            b0 = (2t.., g), b1 = (2t + 8.., g)
//   mma_tf32  A 16 x 8            a0 = (g, 2t), a1 = (g + 8, 2t), a2 = (g, 2t + 1), a3 = (g + 8, 2t + 1)
//             B 8 x 8             b0 = (2t, g), b1 = (2t + 1, g)
//
// where "2t.." is the pair 2t, 2t + 1 in one register. The instruction numbers the TF32 contraction index otherwise
// (t and t + 4), but a sum does not care for its order as long as A and B agree. Numbered so, an accumulator tile is
// the A fragment of the next product in both types without a shuffle, and a B fragment is what ldmatrix loads: from
// rows n of k-neighbours as they lie, from rows k of n-neighbours with .trans.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/cuda/kernel.h"

namespace tessera::ops::kda::cuda {

using half = __half;
using tessera::cuda::bf16;

// FP16 workspaces are views of type bf16: the same 16 bits an element, and NaN when poisoned.
inline half* halves(const View& view) { return reinterpret_cast<half*>(view.gpu<bf16>()); }

// ---- a tile in shared memory: rows of kUnits units of 16 bytes, units of a row exchanged so that eight neighbouring
// rows at one unit (what ldmatrix reads) or one row's units (what copies write) lie in different banks ----

template <int kUnits>
__device__ constexpr int swizzled(int row, int unit) {  // in units from the tile's start
  static_assert(kUnits == 2 || kUnits == 4 || kUnits % 8 == 0);
  constexpr int kRowsALine = kUnits >= 8 ? 1 : 8 / kUnits, kMask = (kUnits >= 8 ? 8 : kUnits) - 1;
  return row * kUnits + (unit ^ (row / kRowsALine & kMask));
}
template <int kUnits>
__device__ inline uint32_t unit_address(uint32_t tile, int row, int unit) {
  return tile + 16 * static_cast<uint32_t>(swizzled<kUnits>(row, unit));
}
__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Register i of matrix i
// is (g, 2t..); with trans (2t.., g).
__device__ inline void load_matrices(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_trans(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ inline void store_matrices_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- asynchronous copies from global to shared memory, 16 bytes each ----

// Zeros where not `valid`; `from` is not read then, but must be an address.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's newest groups are on the way. A barrier makes the rest visible to others.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Asks for a line of global memory, to be in the L2 cache when it is loaded.
__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// kRows rows of 8 kUnits elements, contiguous in global memory, by a block of kThreads threads.
template <int kRows, int kUnits, int kThreads>
__device__ void copy_tile_async(uint32_t to, const void* from) {
  static_assert(kRows * kUnits % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kUnits / kThreads; ++i) {
    const int u = i * kThreads + static_cast<int>(threadIdx.x);
    copy_async(unit_address<kUnits>(to, u / kUnits, u % kUnits), static_cast<const uint4*>(from) + u);
  }
}

// ---- conversions ----

__device__ inline uint32_t tf32(float x) {  // to nearest
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
__device__ inline float2 floats_of_halves(uint32_t pair) {  // exact in TF32
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
__device__ inline float2 floats_of_bf16s(uint32_t pair) {  // exact in TF32
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ inline uint32_t pack_halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline uint32_t pack_bf16s(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// ---- products: c += a b ----

__device__ inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// `pair` holds two 16-bit neighbours along the contraction, as ldmatrix loads them.
__device__ inline void mma_tf32_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t pair) {
  const float2 b = floats_of_halves(pair);
  mma_tf32(c, a, __float_as_uint(b.x), __float_as_uint(b.y));
}
__device__ inline void mma_tf32_bf16s(float (&c)[4], const uint32_t (&a)[4], uint32_t pair) {
  const float2 b = floats_of_bf16s(pair);
  mma_tf32(c, a, __float_as_uint(b.x), __float_as_uint(b.y));
}
__device__ inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An accumulator tile as the A fragment of a TF32 product.
__device__ inline void tf32_fragment(const float (&c)[4], uint32_t (&a)[4]) {
  a[0] = tf32(c[0]), a[1] = tf32(c[2]), a[2] = tf32(c[1]), a[3] = tf32(c[3]);
}

}  // namespace tessera::ops::kda::cuda
