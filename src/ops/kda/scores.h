// The two (C, C) matrices of a chunk and their backward: with D_ij,c = e^{G_ic - G_jc},
//
//   A_ij = beta_i sum_c k_ic k_jc D_ij,c  (i > j)        P_ij = sum_c q_ic k_jc D_ij,c  (i >= j), q times the scale
//
// D cannot be split into a row and a column factor over a whole chunk: one of them would overflow. So the chunk is cut:
//
//   block below the diagonal   rows [a, a + h), columns [a - h, a), h = 32 and 16: matrix products of k_i e^{G_i - G_a}
//                              and k_j e^{G_a - G_j}, row a (the first of the rows) the anchor: both exponents <= 0
//   16 x 16 diagonal tile      pair by pair with D_ij = D_i,j+1 alpha_j+1, a running product: no exponent at all
//
// An anchor never depends on a row after the one it is used for, so a prefix keeps its bits whatever follows. Blocks
// of 32 rows are whole blocks of the doubling scheme; with tiles of 16 alone the products would be thinner.
#pragma once

#include "ops/kda/chunk.h"

namespace tessera::ops::kda::cpu {

template <class Real>
struct ScoreScratch {
  ScoreScratch(Carver<Real>& carver, const Widths& w);

  Matrix<Real> row_k, row_q, row_decay;   // (16..32, K): operands with the row factors, and the factors
  Matrix<Real> column_k, column_decay;    // (16..32, K)
  Matrix<Real> product;                   // (16..32, the larger of that and K); free between calls
  Matrix<Real> column_k_t;                // (K, 16..32)
  Matrix<Real> k_t, q_t, alpha_t, carry;  // (K, 16): a diagonal tile channel by channel
};

// -A (absent, data null, where the inverse is known) and P. Whole tiles up to and on the diagonal are written.
template <class Real>
void scores(const Chunk<Real>&, const Widths&, ScoreScratch<Real>&, Matrix<Real> minus_a, Matrix<Real> p);

// Gradients of the operands, from dA and dP (rows, rows; entries on and above the diagonal are not read), overwritten:
//   by_q_i = sum_{j<i} dP_ij k_j D_ij                    by_k_row_i = sum_{j<i} dA_ij k_j D_ij
//   by_k_column_j = sum_{i>j} (dA_ij beta_i k_i + dP_ij q_i) D_ij
// by_k_row lacks the factor beta_i: dbeta needs it so. The terms of P's diagonal, dP_ii k_i of dq and dP_ii q_i of dk,
// are left to the caller: no gate acts on them, and in the gradient of a steep gate they would cancel far larger than
// what is left.
template <class Real>
struct ScoreGrads {
  Matrix<Real> by_q, by_k_row, by_k_column;  // (C, K)
};
template <class Real>
void scores_backward(const Chunk<Real>&, const Widths&, ScoreScratch<Real>&, Matrix<Real> da, Matrix<Real> dp,
                     const ScoreGrads<Real>&);

}  // namespace tessera::ops::kda::cpu
