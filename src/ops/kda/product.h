// Dense building blocks of a chunk, on one thread: vectors, small matrix products, transposition.
//
// A chunk is some thirty products of 16..128 rows and columns whose operands lie in the second-level cache. A general
// GEMM packs its operands first, which at these shapes costs as much as the product; the kernel here reads them in
// place and keeps eight rows of one vector in registers. Measured on one Zen 4 core, C (64 x 128) = A (64 x 128) B:
// 110 GFLOP/s against 33 through oneDNN; 16 x 16 x 16: 105. Every element of C is one chain of fused multiply-adds in
// the order of k, whatever the other extents: appended rows cannot change the bits of earlier ones.
#pragma once

#include <cstdint>

#include "ops/gemm/gemm.h"

namespace tessera::ops::kda::cpu {

inline constexpr int64_t kTile = 16;  // rows of a sub-tile; widths and row counts in workspaces are multiples of it

inline int64_t padded(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

#ifdef __AVX512F__
inline constexpr int64_t kVectorBytes = 64;
#else
inline constexpr int64_t kVectorBytes = 32;
#endif

template <class Real>
struct VectorOf {
  using Type __attribute__((vector_size(kVectorBytes), aligned(sizeof(Real)), may_alias)) = Real;
};
template <class Real>
using Vector = typename VectorOf<Real>::Type;
template <class Real>
inline constexpr int64_t kLanes = kVectorBytes / int64_t{sizeof(Real)};

template <class Real>
Vector<Real>& vector_at(Real* p) {
  return *reinterpret_cast<Vector<Real>*>(p);
}

// Rows `stride` elements apart; who knows the extents passes them.
template <class Real>
struct Matrix {
  Real* data = nullptr;
  int64_t stride = 0;

  Real* row(int64_t r) const { return data + r * stride; }
  Matrix at(int64_t r, int64_t c) const { return {data + r * stride + c, stride}; }
};

enum class Write : uint8_t { set, add };

// C (m, n) = op(A) (m, k) B (k, n), or added to C. m and n are multiples of 16; k is any.
template <class Real>
void multiply(Trans trans_a, Write write, int64_t m, int64_t n, int64_t k, Matrix<Real> a, Matrix<Real> b,
              Matrix<Real> c);

// to (cols, rows) = from (rows, cols)^T; multiples of 16.
template <class Real>
void transpose(int64_t rows, int64_t cols, Matrix<Real> from, Matrix<Real> to);

}  // namespace tessera::ops::kda::cpu
