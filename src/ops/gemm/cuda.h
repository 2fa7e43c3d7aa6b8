// Matrix products on the GPU: the one place that talks to cuBLASLt. Building block of the ops; charges no ledger.
//
//   D (m, n) = alpha op(A) op(B) + beta C,  row-major, float32 accumulation; beta == 0 never reads C. D is C, or apart.
//
//   bf16 x bf16 -> bf16 or f32 on the tensor cores,   f32 x f32 -> f32 without rounding of the operands (no TF32)
//
// The algorithm is cuBLASLt's own choice for the whole description, asked for once and kept. None that adds partial
// sums in the order of their arrival, or in bf16, is allowed: the same description gives the same bits.
#pragma once

#include "core/context.h"
#include "ops/gemm/gemm.h"

namespace tessera::ops {

struct GpuOperand {
  void* data = nullptr;
  DType dtype = DType::none;
  int64_t row_stride = 0;    // elements from one row, as stored, to the next
  int64_t batch_stride = 0;  // from one matrix to the next
};
GpuOperand operand(const View&);  // (rows, columns) with any row stride, or (batches, rows, columns)

struct GpuProduct {
  int64_t m, n, k;  // any may be 0, k only with beta == 1: there is nothing to add
  Trans trans_a = Trans::no, trans_b = Trans::no;
  GpuOperand a, b, c;
  GpuOperand d = {};  // absent: C is overwritten. Of the type of C
  float alpha = 1, beta = 0;
  int64_t batches = 1;
};

// What NVIDIA advises for Hopper, and room to begin at its alignment.
inline constexpr int64_t kGemmWorkspaceBytes = (int64_t{32} << 20) + 256;
inline View gemm_workspace(Arena& arena) { return arena.allocate(DType::u8, {kGemmWorkspaceBytes}); }

void gemm(GpuStream, const GpuProduct&, const View& workspace);
double measured_gpu_gemm_rate();  // see measured_gemm_rate()

}  // namespace tessera::ops
