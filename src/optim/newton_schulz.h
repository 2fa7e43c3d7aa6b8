// Newton-Schulz iteration: moves the singular values of X (rows, cols) towards 1 by matrix products alone.
//
//   A = X X^T;  B = c2 A + c3 A A;  X = c1 X + B X       (c1, c2, c3) = (3.4445, -4.7750, 2.0315)
//
// Five iterations take singular values in [0.01, 1] to [0.682, 1.134]. With rows > cols it works on X^T, without
// transposing: A = X^T X and X = X (c1 + B). Source: moe.md 7.1.
//
// Products are cut into tiles of sizes fixed by the shape, and each tile is one single-threaded GEMM: the same bits for
// any number of threads, whether a matrix is shared out by tiles or sits on one thread with others beside it. A and B
// are symmetric: tiles above the diagonal are mirrored, not computed.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace tessera::optim {

template <class Real>
struct NewtonSchulzWorkspace {
  Real *x, *next;  // (rows, cols)
  Real *a, *b;     // (n, n), n = min(rows, cols)
};

int64_t newton_schulz_workspace_elements(int64_t rows, int64_t cols, DType);
template <class Real>
NewtonSchulzWorkspace<Real> carve_newton_schulz(Real* memory, int64_t rows, int64_t cols);

// Starts from x, whose Frobenius norm must be at most 1; returns x or next, whichever holds the result.
template <class Real>
Real* newton_schulz(int64_t rows, int64_t cols, int64_t steps, const NewtonSchulzWorkspace<Real>&);

int64_t newton_schulz_flops(int64_t rows, int64_t cols, int64_t steps);  // of whole products

}  // namespace tessera::optim
