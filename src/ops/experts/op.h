// Expert products: each token visits its k experts, every expert works on all its tokens at once.
//
//   y_i = sum over slots s of p_is * W2_e [ act(W1_e x_i) o lift(W3_e x_i) ],   e = experts_is, slots in fixed order
//
// Tokens are ordered by expert (a stable counting sort), each expert runs three products on its contiguous rows, and
// the results return to their tokens. No token is dropped; experts without tokens and empty batches are legal.
// Source: moe.md 3.1, 3.2 (t = W2^T du gives both the activation's gradient p t and the weight's gradient <h, t>, so no
// expert output is saved) and 1.3.
//
// R rows: T k on the CPU. On CUDA the rows of every expert begin at a multiple of 128 and are followed by rows of zeros
// up to the next one, so that products work on whole blocks: R is the most rows that any routing can take.
#pragma once

#include "core/context.h"
#include "ops/glu/op.h"

namespace tessera::ops::experts {

struct Dims {
  int64_t tokens, experts, top_k, width, hidden;  // T, E, k, L, F
  glu::Activation activation;
};
struct Inputs {
  View x;        // (T, L)
  View indices;  // (T, k) i32; -1: the slot is empty
  View weights;  // (T, k), exact_type
  View w1, w3;   // (E, F, L): gate and up
  View w2;       // (E, L, F): down
};
struct Outputs {
  View y;  // (T, L)
  // (E) f64: the sum over an expert's tokens of |y|^2, its own output before weighting, is added. Absent: not wanted.
  View squares = {};
};
struct Saved {
  View slots;     // (R) i64: rows ordered by expert -> slot index t k + s. CPU: empty slots last. CUDA: -1 in padding
  View offsets;   // (E + 1) i64: rows of expert e are [offsets[e], offsets[e+1])
  View gate, up;  // (R, F): pre-activations by row
  // CUDA only:
  View rows;    // (T k) i64: slot -> row; -1 for empty slots
  View counts;  // (E) i64: rows of each expert without padding
  View blocks;  // (R / 128) i32: expert of each block of rows; -1 past the last
};
struct OutputGrads {
  View y;  // (T, L)
};
struct Grads {
  View x;           // (T, L); overwritten
  View weights;     // (T, k), exact_type; overwritten, zero for empty slots
  View w1, w3, w2;  // exact_type; added to
};

Costs costs(const Dims&, DType, Pass, Product, Device back_end = Device::cpu);
Saved allocate_saved(Context&, const Dims&, DType);

// Saved null: inference; slots and offsets are workspace then.
void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(Context&, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::experts
