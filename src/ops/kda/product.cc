#include "ops/kda/product.h"

#include <type_traits>

namespace tessera::ops::kda::cpu {
namespace {

constexpr int64_t kRows = 8;  // enough independent chains to cover the latency of a fused multiply-add

template <bool kTransA, class Real>
void row_block(Write write, int64_t n, int64_t k, Matrix<Real> a, Matrix<Real> b, Matrix<Real> c) {
  for (int64_t j = 0; j < n; j += kLanes<Real>) {
    Vector<Real> sum[kRows] = {};
    for (int64_t p = 0; p < k; ++p) {
      const Vector<Real> row = vector_at(b.row(p) + j);
#pragma GCC unroll 8
      for (int64_t i = 0; i < kRows; ++i) sum[i] += (kTransA ? a.row(p)[i] : a.row(i)[p]) * row;
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < kRows; ++i) {
      Vector<Real>& out = vector_at(c.row(i) + j);
      out = write == Write::add ? out + sum[i] : sum[i];
    }
  }
}

// One step of the butterfly: rows i and i + S exchange their off-diagonal S x S blocks.
template <int kStep, class Real>
void exchange(Vector<Real>* rows) {
  using Index = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  constexpr int kCount = static_cast<int>(kLanes<Real>);
  using Mask __attribute__((vector_size(kVectorBytes))) = Index;
  Mask low, high;
  for (int l = 0; l < kCount; ++l) {
    low[l] = (l & kStep) == 0 ? l : kCount + l - kStep;
    high[l] = (l & kStep) == 0 ? l + kStep : kCount + l;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    if ((i & kStep) != 0) continue;
    const Vector<Real> a = rows[i], b = rows[i + kStep];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + kStep] = __builtin_shuffle(a, b, high);
  }
}

}  // namespace

template <class Real>
void multiply(Trans trans_a, Write write, int64_t m, int64_t n, int64_t k, Matrix<Real> a, Matrix<Real> b,
              Matrix<Real> c) {
  for (int64_t i = 0; i < m; i += kRows) {
    if (trans_a == Trans::yes) {
      row_block<true>(write, n, k, a.at(0, i), b, c.at(i, 0));
    } else {
      row_block<false>(write, n, k, a.at(i, 0), b, c.at(i, 0));
    }
  }
}

template <class Real>
void transpose(int64_t rows, int64_t cols, Matrix<Real> from, Matrix<Real> to) {
  constexpr int64_t kCount = kLanes<Real>;
  for (int64_t r = 0; r < rows; r += kCount) {
    for (int64_t c = 0; c < cols; c += kCount) {
      Vector<Real> block[kCount];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kCount; ++i) block[i] = vector_at(from.row(r + i) + c);
      exchange<1, Real>(block);
      exchange<2, Real>(block);
      if constexpr (kCount > 4) exchange<4, Real>(block);
      if constexpr (kCount > 8) exchange<8, Real>(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kCount; ++i) vector_at(to.row(c + i) + r) = block[i];
    }
  }
}

template void multiply(Trans, Write, int64_t, int64_t, int64_t, Matrix<float>, Matrix<float>, Matrix<float>);
template void multiply(Trans, Write, int64_t, int64_t, int64_t, Matrix<double>, Matrix<double>, Matrix<double>);
template void transpose(int64_t, int64_t, Matrix<float>, Matrix<float>);
template void transpose(int64_t, int64_t, Matrix<double>, Matrix<double>);

}  // namespace tessera::ops::kda::cpu
