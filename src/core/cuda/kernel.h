// What every CUDA back end file uses: types, launches, the choice of a kernel by dtype, reductions in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/gpu.h"

namespace tessera {

template <>
inline constexpr DType dtype_of<__nv_bfloat16> = DType::bf16;

namespace cuda {

using bf16 = __nv_bfloat16;  // the same bits as tessera::bf16, with the GPU's conversions

// Calls f with a value of the element type of a kernel: float or bf16.
template <class F>
void dispatch(DType dtype, F&& f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::bf16) return f(bf16{});
  throw Error(fmt::format("the CUDA back end stores activations as f32 or bf16, found {}", name_of(dtype)));
}

// launch(kernel, grid, block, shared bytes, stream)(arguments...): nothing for an empty grid, an error checked at once.
template <class... Parameters>
struct Launch {
  void (*kernel)(Parameters...);
  int64_t grid;
  int block;
  int64_t shared_bytes;
  GpuStream stream;

  template <class... Arguments>
  void operator()(Arguments&&... arguments) const {
    if (grid == 0) return;
    TESSERA_CHECK(grid < (int64_t{1} << 31), "grid of {} blocks", grid);
    if (shared_bytes > 48 * 1024) {
      TESSERA_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    }
    kernel<<<static_cast<unsigned>(grid), static_cast<unsigned>(block), static_cast<size_t>(shared_bytes), stream>>>(
        static_cast<Parameters>(arguments)...);
    TESSERA_CUDA(cudaGetLastError());
  }
};
template <class... Parameters>
Launch<Parameters...> launch(void (*kernel)(Parameters...), int64_t grid, int block, int64_t shared_bytes,
                             GpuStream stream) {
  return {kernel, grid, block, shared_bytes, stream};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}

// Eight neighbouring elements as floats; `p` must be aligned to their size (16 bytes of bf16, 32 of float).
__device__ inline void load8(const bf16* p, float (&x)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = __bfloat1622float2(pairs[i]);
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}
__device__ inline void load8(const float* p, float (&x)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ inline void store8(bf16* p, const float (&x)[8]) {
  uint4 raw;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = raw;
}
__device__ inline void store8(float* p, const float (&x)[8]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}
// The same with a bound: elements at and past `count` read as 0 and are not written. `whole`: the aligned form may be
// used (count >= 8, address aligned), decided once by the launcher.
template <class T>
__device__ void load8(const T* p, int64_t count, bool whole, float (&x)[8]) {
  if (whole && count >= 8) return load8(p, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i < count ? to_float(p[i]) : 0.0f;
}
template <class T>
__device__ void store8(T* p, int64_t count, bool whole, const float (&x)[8]) {
  if (whole && count >= 8) return store8(p, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) p[i] = from_float<T>(x[i]);
  }
}
// Whether rows of these views may be read eight elements at a time. A vector is one row.
inline bool eights(const View& v) {
  const bool rows = v.rank() == 1 ? v.dim(0) % 8 == 0 : v.row_elements() % 8 == 0 && v.row_stride() % 8 == 0;
  return rows && reinterpret_cast<uintptr_t>(v.data()) % 32 == 0;
}
template <class... More>
bool eights(const View& first, const More&... more) {
  return eights(first) && eights(more...);
}

template <class T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}
// Sum over a block of a multiple of 32 threads, the same in every thread. `shared` holds one T a warp; a barrier must
// lie between two uses of it, and this function begins with one.
template <class T>
__device__ T block_sum(T x, T* shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  T sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += shared[w];
  return sum;
}

}  // namespace cuda
}  // namespace tessera
