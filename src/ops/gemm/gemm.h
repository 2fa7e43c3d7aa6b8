// Matrix products on the CPU: the one place that talks to oneDNN. Building block of the ops; charges no ledger.
//
//   C (m, n) = alpha op(A) op(B) + beta C,  row-major, leading dimensions in elements; beta == 0 never reads C.
//
// float goes to oneDNN's JIT kernels; double to a plain blocked loop, which exists for proofs on small shapes.
// Any of m, n, k may be 0 (k == 0 scales C by beta). For a given shape and thread count the result is always the same
// bits; another thread count may split k differently.
#pragma once

#include <cstdint>

#include "core/context.h"

namespace tessera::ops {

enum class Trans : bool { no = false, yes = true };

// Uses all threads of the pool; inside a parallel region it runs on the calling thread alone.
template <class Real>
void gemm(Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k, Real alpha, const Real* a, int64_t lda,
          const Real* b, int64_t ldb, Real beta, Real* c, int64_t ldc);

// The same product with operands rounded to bf16 and float32 accumulation when `product` is bf16; otherwise gemm().
// `scratch` holds the rounded operands: gemm_scratch_bytes() bytes, 64-byte aligned; null when that is 0.
// double ignores `product`.
template <class Real>
void gemm(Product product, void* scratch, Trans trans_a, Trans trans_b, int64_t m, int64_t n, int64_t k, Real alpha,
          const Real* a, int64_t lda, const Real* b, int64_t ldb, Real beta, Real* c, int64_t ldc);

int64_t gemm_scratch_bytes(Product product, int64_t m, int64_t n, int64_t k);

bool cpu_has_bf16_products();

// The device's own sustained rate of large products, in FLOP/s: the best of five. 2048 cubed on the CPU; 8192 cubed in
// bf16 on the GPU, whatever `product` is.
double measured_gemm_rate(Product product, Device device = Device::cpu);

}  // namespace tessera::ops
