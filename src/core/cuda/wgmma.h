// Products of a group of 128 threads on an sm_90 chip: bf16 operands, float32 sums in registers.
//
// Operands lie in shared memory as the copy engine leaves them with 128-byte swizzling: panels of 64 columns, a panel's
// rows 128 bytes apart, 16-byte piece p of row r at piece p ^ (r % 8); panels begin at multiples of 1024 bytes. Either
// index of such a tile may be the one that is summed over: columns (Major::K) or rows (Major::MN). The first operand
// may be in registers instead, as the fragments that a rounded result makes (mma.h of the attention: the same layout).
//
// Sum i of a thread is element (warp * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2).
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

namespace tessera::cuda::wgmma {

using Major = cute::SM90::GMMA::Major;

// Where an operand begins: the lower word of its descriptor. The upper one is the same for all.
struct Operand {
  uint32_t low;

  __device__ Operand on(uint32_t bytes) const { return {low + bytes / 16}; }  // the same, `bytes` further on
  __device__ uint64_t descriptor() const {
    constexpr uint32_t kHigh = 1u << 30 | 1024 / 16;  // 128-byte swizzling, 1024 bytes from eight rows to the next
    uint64_t both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(kHigh));
    return both;
  }
};
// `address` / 16, of shared memory. Columns are summed over: steps of 16 are 32 bytes on, within a panel.
__device__ inline Operand by_columns(uint32_t sixteenths) { return {sixteenths + (1u << 16)}; }
// Rows are summed over: steps of 16 are 2048 bytes on. `panel`: bytes from 64 columns to the next 64.
__device__ inline Operand by_rows(uint32_t sixteenths, uint32_t panel) { return {sixteenths + (panel / 16 << 16)}; }

namespace detail {
template <class Op, size_t... I>
__device__ void multiply(Operand a, Operand b, float* sums, bool add, std::index_sequence<I...>) {
  Op::fma(a.descriptor(), b.descriptor(), sums[I]...,
          add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <class Op, size_t... I>
__device__ void multiply(const uint32_t (&a)[4], Operand b, float* sums, std::index_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b.descriptor(), sums[I]..., cute::SM90::GMMA::ScaleOut::One);
}
}  // namespace detail

// sums = a b, or sums += a b, over 16 elements of the summed index. Started, not finished.
template <class Op>
__device__ void multiply(Operand a, Operand b, float* sums, bool add = true) {
  detail::multiply<Op>(a, b, sums, add, std::make_index_sequence<std::extent_v<typename Op::CRegisters>>{});
}
template <class Op>
__device__ void multiply(const uint32_t (&a)[4], Operand b, float* sums) {
  detail::multiply<Op>(a, b, sums, std::make_index_sequence<std::extent_v<typename Op::CRegisters>>{});
}

// Before the first product after a thread has touched registers of one.
__device__ inline void begin() { cute::warpgroup_arrive(); }
// Products so far are one batch; finished<n>: all batches but the last n are done.
__device__ inline void commit() { cute::warpgroup_commit_batch(); }
template <int kLater>
__device__ void finished() {
  cute::warpgroup_wait<kLater>();
}
// The compiler neither moves uses of `sums` across this nor keeps copies of them.
template <int kCount>
__device__ void settle(float* sums) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(sums[i]);
}

}  // namespace tessera::cuda::wgmma
