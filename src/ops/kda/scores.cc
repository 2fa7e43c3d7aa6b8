#include "ops/kda/scores.h"

#include <algorithm>
#include <array>

namespace tessera::ops::kda::cpu {
namespace {

// Columns of a tile at a time: two accumulators each fit the registers.
template <class Real>
constexpr int64_t kColumns = std::min<int64_t>(8, kLanes<Real>);

template <class Real>
Vector<Real> unit(int64_t lane) {
  static constexpr auto kTable = [] {
    std::array<Real, 2 * kLanes<Real>> table{};
    table[kLanes<Real>] = 1;
    return table;
  }();
  return vector_at(const_cast<Real*>(kTable.data()) + kLanes<Real> - lane);
}

// Some columns of a tile for the rows [row, row + lanes), all channels. A vector holds rows. `decay` of column j is
// that of column j + 1 times alpha_{j+1}, with a 1 where row == column; rows above the diagonal stay exactly 0, so
// the triangle is selected without a mask. kFirst: no column of these rows came before; kInside: columns among the
// rows.
template <bool kFirst, bool kInside, bool kKeys, class Real>
void tile_columns(int64_t width, int64_t row, int64_t column, const ScoreScratch<Real>& s, Vector<Real>* kk,
                  Vector<Real>* qk) {
  for (int64_t c = 0; c < width; ++c) {
    const Real *k_c = s.k_t.row(c) + column, *alpha = s.alpha_t.row(c) + column;
    const Vector<Real> k_rows = vector_at(s.k_t.row(c) + row), q_rows = vector_at(s.q_t.row(c) + row);
    Vector<Real>& carry = vector_at(s.carry.row(c) + row);
    Vector<Real> decay = {};
    if (!kFirst) decay = carry;
#pragma GCC unroll 8
    for (int64_t j = kColumns<Real> - 1; j >= 0; --j) {
      if (!kFirst || j < kColumns<Real> - 1) decay *= alpha[j + 1];
      if (kInside) decay += unit<Real>(column + j - row);
      const Vector<Real> k_decayed = decay * k_c[j];
      if (kKeys) kk[j] += k_decayed * k_rows;
      qk[j] += k_decayed * q_rows;
    }
    carry = decay;
  }
}

template <bool kKeys, class Real>
void diagonal_tile(const Chunk<Real>& c, int64_t width, int64_t t, const ScoreScratch<Real>& s, Matrix<Real> minus_a,
                   Matrix<Real> p) {
  transpose(kTile, width, c.k.at(t, 0), s.k_t);
  transpose(kTile, width, c.q.at(t, 0), s.q_t);
  transpose(kTile, width, c.alpha.at(t, 0), s.alpha_t);
  alignas(64) Real by_column[2][kTile * kTile] = {};  // [column][row]
  for (int64_t row = 0; row < kTile; row += kLanes<Real>) {
    const int64_t top = row + kLanes<Real> - kColumns<Real>;
    for (int64_t column = top; column >= 0; column -= kColumns<Real>) {
      Vector<Real> kk[kColumns<Real>] = {}, qk[kColumns<Real>] = {};
      if (column == top) {
        tile_columns<true, true, kKeys>(width, row, column, s, kk, qk);
      } else if (column >= row) {
        tile_columns<false, true, kKeys>(width, row, column, s, kk, qk);
      } else {
        tile_columns<false, false, kKeys>(width, row, column, s, kk, qk);
      }
      for (int64_t j = 0; j < kColumns<Real>; ++j) {
        vector_at(by_column[0] + (column + j) * kTile + row) = kk[j];
        vector_at(by_column[1] + (column + j) * kTile + row) = qk[j];
      }
    }
  }
  transpose(kTile, kTile, {by_column[1], kTile}, p.at(t, t));
  if (!kKeys) return;
  for (int64_t i = 0; i < kTile; ++i) {
    Real* out = minus_a.row(t + i) + t;
    for (int64_t j = 0; j < kTile; ++j) out[j] = j < i ? -c.beta[t + i] * by_column[0][j * kTile + i] : Real(0);
  }
}

// Row factors e^{G_i - G_a} of rows [a, a + count), and their products with q and with sign beta k.
template <class Real>
void row_operands(const Chunk<Real>& c, int64_t width, int64_t a, int64_t count, Real sign, bool keys,
                  const ScoreScratch<Real>& s) {
  std::fill_n(s.row_decay.row(0), width, Real(1));
  for (int64_t i = 0; i < count; ++i) {
    const Real *q = c.q.row(a + i), *k = c.k.row(a + i), *alpha = c.alpha.row(a + i);
    const Real* before = s.row_decay.row(std::max<int64_t>(i - 1, 0));
    Real *decay = s.row_decay.row(i), *row_q = s.row_q.row(i), *row_k = s.row_k.row(i);
    if (i > 0) {
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) decay[j] = before[j] * alpha[j];
    }
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) row_q[j] = q[j] * decay[j];
    if (!keys) continue;
    const Real factor = sign * c.beta[a + i];
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) row_k[j] = factor * k[j] * decay[j];
  }
}

// Column factors e^{G_a - G_j} of rows [a - count, a), and their products with k.
template <class Real>
void column_operands(const Chunk<Real>& c, int64_t width, int64_t a, int64_t count, const ScoreScratch<Real>& s) {
  const Real* after = nullptr;
  for (int64_t j = count - 1; j >= 0; --j) {
    const Real *k = c.k.row(a - count + j), *alpha = c.alpha.row(a - count + j + 1);
    Real *decay = s.column_decay.row(j), *column_k = s.column_k.row(j);
    if (after == nullptr) {
      std::copy_n(alpha, width, decay);
    } else {
#pragma omp simd
      for (int64_t l = 0; l < width; ++l) decay[l] = after[l] * alpha[l];
    }
#pragma omp simd
    for (int64_t l = 0; l < width; ++l) column_k[l] = k[l] * decay[l];
    after = decay;
  }
}

// Calls f(a, rows, h) for every block below the diagonal tiles: rows [a, a + rows), columns [a - h, a).
template <class F>
void for_each_block(int64_t rows, F&& f) {
  for (int64_t h = kTile; h < rows; h *= 2) {
    for (int64_t a = h; a < rows; a += 2 * h) f(a, std::min(h, rows - a), h);
  }
}

template <bool kKeys, class Real>
void all_scores(const Chunk<Real>& c, const Widths& w, ScoreScratch<Real>& s, Matrix<Real> minus_a, Matrix<Real> p) {
  for (int64_t t = 0; t < c.rows; t += kTile) diagonal_tile<kKeys>(c, w.key, t, s, minus_a, p);
  for_each_block(c.rows, [&](int64_t a, int64_t count, int64_t h) {
    row_operands(c, w.key, a, count, Real(-1), kKeys, s);
    column_operands(c, w.key, a, h, s);
    transpose(h, w.key, s.column_k, s.column_k_t);
    multiply(Trans::no, Write::set, count, h, w.key, s.row_q, s.column_k_t, p.at(a, a - h));
    if (kKeys) multiply(Trans::no, Write::set, count, h, w.key, s.row_k, s.column_k_t, minus_a.at(a, a - h));
  });
}

// One vector of channels of a tile, pair by pair. `da` and `dp` point at the tile.
template <class Real>
void tile_backward(const Chunk<Real>& c, int64_t t, int64_t channel, Matrix<Real> da, Matrix<Real> dp,
                   const ScoreGrads<Real>& out) {
  const auto at = [&](const Matrix<Real>& m, int64_t i) -> Vector<Real>& { return vector_at(m.row(t + i) + channel); };
  Vector<Real> by_column[kTile] = {};
  for (int64_t i = 0; i < kTile; ++i) {
    const Vector<Real> q = at(c.q, i), k_beta = at(c.k, i) * c.beta[t + i];
    const Real *da_i = da.row(i), *dp_i = dp.row(i);
    Vector<Real> by_q = {}, by_k = {}, decay = Vector<Real>{} + Real(1);
    for (int64_t j = i - 1; j >= 0; --j) {
      decay *= at(c.alpha, j + 1);
      const Vector<Real> k_decayed = at(c.k, j) * decay;
      by_q += dp_i[j] * k_decayed;
      by_k += da_i[j] * k_decayed;
      by_column[j] += decay * (da_i[j] * k_beta + dp_i[j] * q);
    }
    at(out.by_q, i) = by_q;
    at(out.by_k_row, i) = by_k;
  }
  for (int64_t i = 0; i < kTile; ++i) at(out.by_k_column, i) = by_column[i];
}

// to (count, width) += decay o product
template <class Real>
void add_decayed(int64_t count, int64_t width, Matrix<Real> decay, Matrix<Real> product, Matrix<Real> to) {
  for (int64_t i = 0; i < count; ++i) {
    const Real *f = decay.row(i), *x = product.row(i);
    Real* y = to.row(i);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) y[j] += f[j] * x[j];
  }
}

}  // namespace

template <class Real>
ScoreScratch<Real>::ScoreScratch(Carver<Real>& carver, const Widths& w) {
  const int64_t half = std::max(w.chunk / 2, kTile);
  for (Matrix<Real>* m : {&row_k, &row_q, &row_decay, &column_k, &column_decay}) *m = carver.matrix(half, w.key);
  product = carver.matrix(half, std::max(half, w.key));
  column_k_t = carver.matrix(w.key, half);
  for (Matrix<Real>* m : {&k_t, &q_t, &alpha_t, &carry}) *m = carver.matrix(w.key, kTile);
}

template <class Real>
void scores(const Chunk<Real>& c, const Widths& w, ScoreScratch<Real>& s, Matrix<Real> minus_a, Matrix<Real> p) {
  if (minus_a.data != nullptr) {
    all_scores<true>(c, w, s, minus_a, p);
  } else {
    all_scores<false>(c, w, s, minus_a, p);
  }
}

template <class Real>
void scores_backward(const Chunk<Real>& c, const Widths& w, ScoreScratch<Real>& s, Matrix<Real> da, Matrix<Real> dp,
                     const ScoreGrads<Real>& out) {
  for (int64_t t = 0; t < c.rows; t += kTile) {
    for (int64_t channel = 0; channel < w.key; channel += kLanes<Real>) {
      tile_backward(c, t, channel, da.at(t, t), dp.at(t, t), out);
    }
  }
  for_each_block(c.rows, [&](int64_t a, int64_t count, int64_t h) {
    row_operands(c, w.key, a, count, Real(1), true, s);
    column_operands(c, w.key, a, h, s);
    const Matrix<Real> da_block = da.at(a, a - h), dp_block = dp.at(a, a - h);
    multiply(Trans::no, Write::set, count, w.key, h, dp_block, s.column_k, s.product);
    add_decayed(count, w.key, s.row_decay, s.product, out.by_q.at(a, 0));
    multiply(Trans::no, Write::set, count, w.key, h, da_block, s.column_k, s.product);
    add_decayed(count, w.key, s.row_decay, s.product, out.by_k_row.at(a, 0));
    multiply(Trans::yes, Write::set, h, w.key, count, da_block, s.row_k, s.product);
    multiply(Trans::yes, Write::add, h, w.key, count, dp_block, s.row_q, s.product);
    add_decayed(h, w.key, s.column_decay, s.product, out.by_k_column.at(a - h, 0));
  });
}

#define TESSERA_KDA_SCORES(Real)                                                                                    \
  template struct ScoreScratch<Real>;                                                                               \
  template void scores(const Chunk<Real>&, const Widths&, ScoreScratch<Real>&, Matrix<Real>, Matrix<Real>);         \
  template void scores_backward(const Chunk<Real>&, const Widths&, ScoreScratch<Real>&, Matrix<Real>, Matrix<Real>, \
                                const ScoreGrads<Real>&);
TESSERA_KDA_SCORES(float)
TESSERA_KDA_SCORES(double)
#undef TESSERA_KDA_SCORES

}  // namespace tessera::ops::kda::cpu
