// Tokens to rows and back. A slot is (token, choice), slot = t k + s; rows are ordered by expert.
#pragma once

#include "ops/experts/cuda.h"

namespace tessera::ops::experts::cuda {

// Fills all of `saved` but gate and up: a stable counting sort, whose result depends on the indices alone.
void order_by_expert(GpuStream, const Dims&, const View& indices, const Saved& saved, const View& chunks);

// to (R, L): the token's row of `from` (T, L) for every row; zeros in padding. Rows past the last block stay as they
// are.
void gather_rows(GpuStream, const Dims&, const Saved&, const View& from, const View& to);

// h (R, F) = act(gate, up)
void activate(GpuStream, const Dims&, const Saved&, const View& h);

// t = W2^T dy becomes dgate; dup, p h and the weights' gradients are written, zero for empty slots.
void derive(GpuStream, const Dims&, const Saved&, const View& weights, const View& t, const View& dup, const View& h,
            const View& dweights);

// to (T, L) = sum over a token's slots, in their order, of weight times the slot's row of `from`. `weights` absent: 1.
void combine_rows(GpuStream, const Dims&, const Saved&, const View& from, const View& weights, const View& to);

// squares (E) f64 += |row|^2 of each expert's rows
void add_squares(GpuStream, const Dims&, const Saved&, const View& rows, const View& parts, const View& squares);

}  // namespace tessera::ops::experts::cuda
