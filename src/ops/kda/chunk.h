// What forward and backward share of one chunk of one value head: its operands, its state, its inverse.
//
// Decay factors e^{G_i - G_j} are running products of alpha = e^g along the rows, starting at the anchor of each block;
// every factor is a product of numbers in [0, 1], so nothing can overflow for any gate, and a factor that underflows is
// one whose product is below the smallest float. A sum of gates is never subtracted from another.
#pragma once

#include <cmath>

#include "core/parallel.h"
#include "ops/kda/op.h"
#include "ops/kda/product.h"

namespace tessera::ops::kda::cpu {

// Hands out a thread's workspace piece by piece. Without storage it only counts, so that the size that `costs` states
// and the layout that is used come from the same lines.
template <class Real>
class Carver {
 public:
  explicit Carver(Real* base) : base_(base) {}

  Real* take(int64_t elements) {
    Real* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += padded(elements);
    return piece;
  }
  Matrix<Real> matrix(int64_t rows, int64_t columns) { return {take(rows * columns), columns}; }
  int64_t used() const { return used_; }

 private:
  Real* base_;
  int64_t used_ = 0;
};

struct Widths {  // padded to whole tiles
  int64_t chunk, key, value;
};
inline Widths widths(const Dims& d) { return {d.chunk, padded(d.key_dim), padded(d.value_dim)}; }
inline double query_scale(const Dims& d) { return d.scale != 0 ? d.scale : 1 / std::sqrt(double(d.key_dim)); }

// One value head's rows in the activations of all tokens.
template <class Real>
struct Head {
  Matrix<Real> q, k, v, z, beta_logit;
  const Real* dt_bias;
  Real a;  // exp(A_log)
};
template <class Real>
Matrix<Real> head_rows(const View& tokens_heads_width, int64_t head) {
  const int64_t width = tokens_heads_width.rank() == 3 ? tokens_heads_width.dim(2) : 1;
  return {tokens_heads_width.as<Real>() + head * width, tokens_heads_width.dim(1) * width};
}
template <class Real>
Head<Real> head_of(const Dims&, const Inputs&, int64_t value_head);

// Operands of a chunk of n rows; rows n and up to a whole tile are 0 with alpha 1, columns past K likewise.
template <class Real>
struct Chunk {
  Chunk(Carver<Real>& carver, const Widths& w);

  int64_t n = 0, rows = 0;   // valid rows; rows in whole tiles
  Matrix<Real> q, k, alpha;  // (C, K); q times the scale
  Real* beta;                // (C)
  Real* decay;               // (K): e^{G_L}, from the sum of the gates: its rounding recurs every chunk
  Matrix<Real> from_start;   // (2 C, K): rows k o e^G, then, from row `rows`, q o e^G
  Matrix<Real> to_end;       // (C, K): k o e^{G_L - G}
  Real* running;             // (K): scratch

  Matrix<Real> k_from_start() const { return from_start; }
  Matrix<Real> q_from_start() const { return from_start.at(rows, 0); }
};

// dg/dx and dg/dA_log of every token and channel, for backward.
template <class Real>
struct GateSlopes {
  Matrix<Real> by_x, by_a_log;  // (C, K)
};

template <class Real>
void load_chunk(const Dims&, const Head<Real>&, int64_t token, int64_t n, Chunk<Real>&, GateSlopes<Real>*);

// to (rows, width) = factor * from (n, d), zeros beyond.
template <class Real>
void load_rows(Matrix<Real> from, int64_t n, int64_t d, Real factor, Matrix<Real> to, int64_t rows, int64_t width);

// x (rows, V) = diag(beta) (V - x), where x is Kt S0: what the values add to the state's prediction.
template <class Real>
void weigh_errors(const Dims&, const Head<Real>&, int64_t token, const Chunk<Real>&, Matrix<Real> x);

// Asks for the row eight rows after row i of n, in a loop over rows of the activations. These lie HV d elements apart,
// often a multiple of a page, where the hardware does not prefetch by itself; and since such rows share a few sets of
// the caches, asking much earlier would only evict what was asked for before.
enum class Access : int { read = 0, write = 1 };
template <Access kAccess = Access::read, class Real>
void prefetch_ahead(Matrix<Real> rows, int64_t i, int64_t n, int64_t d) {
  constexpr int64_t kAhead = 8, kLine = 64 / int64_t{sizeof(Real)};
  for (int64_t r = i == 0 ? 1 : i + kAhead; r <= i + kAhead && r < n; ++r) {
    for (int64_t j = 0; j < d; j += kLine) __builtin_prefetch(rows.row(r) + j, static_cast<int>(kAccess), 3);
  }
}

// M = (I + A)^{-1} into `inverse` (C, C), from minus_a (rows, rows): forward substitution in each tile, then merging by
// doubling, M21 = M22 (-A21 M11). The result is 0 above the diagonal and the identity past `rows`.
template <class Real>
void invert(int64_t chunk, int64_t rows, Matrix<Real> minus_a, Matrix<Real> scratch, Matrix<Real> inverse);

// C (rows, n) = L B or L^T B for lower-triangular L (rows, rows), B (rows, n): whole tiles above the diagonal are
// neither read nor multiplied.
template <class Real>
void multiply_lower(Trans trans, Write, int64_t rows, int64_t n, Matrix<Real> lower, Matrix<Real> b, Matrix<Real> c);

// States: V-first (V, K) outside, K-first (K, V) padded as the operand of products.
template <class Real>
void load_state(const Dims&, const Real* v_first, Matrix<Real> k_first);  // null: zeros
template <class Real>
void store_state(const Dims&, Matrix<Real> k_first, Real* v_first);

// One value head's state of document n, V-first, in states of all documents or of one (op.h); null: there is none.
template <class Real>
Real* state_of(const View& states, int64_t place, int64_t value_head) {
  if (!states.present() || place < 0 || place >= states.dim(0)) return nullptr;
  return states.as<Real>() + (place * states.dim(1) + value_head) * states.dim(2) * states.dim(3);
}
template <class Real>
Real* initial_state_of(const View& states, int64_t n, int64_t value_head) {
  return state_of<Real>(states, n, value_head);
}
template <class Real>
Real* final_state_of(const View& states, const Documents& documents, int64_t n, int64_t value_head) {
  return state_of<Real>(states, states.rows() - (documents.count() - n), value_head);
}

// The thread's slot in a per-thread workspace of thread_count() slots.
inline int64_t thread_slot() { return omp_get_thread_num(); }

}  // namespace tessera::ops::kda::cpu
