// Router: from logits to the k experts of each token and their weights.
//
//   s = sigmoid(z) (or softmax);  c = s + b;  T = top k of c, ties to the lower index;  p = R s / (sum of selected s)
//
// The bias b only selects; weights use the unbiased s. b is a buffer set by quantile balancing (balance.h), with no
// gradient. The product z = x W_r^T is ops::linear with float32 operands, whatever the run's product type.
// Source: moe.md 1 (forward, ties, numerics; backward), 2 (balancing).
#pragma once

#include "core/context.h"

namespace tessera::ops::router {

enum class Score : uint8_t { sigmoid, softmax };

struct Dims {
  int64_t tokens, experts, top_k;  // T, E, k
  double scale = 1;                // R
  bool renormalise = true;         // p sums to R; never with k = 1, where the router would get no gradient
  Score score = Score::sigmoid;
  int64_t groups = 1, top_groups = 1;  // group-limited selection of older checkpoints; 1: off
};
inline bool renormalised(const Dims& d) { return d.renormalise && d.top_k > 1; }
inline bool needs_all_scores(const Dims& d) { return d.score == Score::softmax && !renormalised(d); }
void check_dims(const Dims&);

// All real tensors are exact_type of the activations: float32 beside bf16.
struct Inputs {
  View logits;  // (T, E)
  View bias;    // (E)
};
struct Outputs {
  View experts;  // (T, k) i32, by falling c; all -1 where the row's logits are not finite
  View weights;  // (T, k): p
  View scores;   // (T, k): s of the selected, kept since c - b would cancel; 0 in invalid rows, as the weights
  View cutoff;   // (T): the (k+1)-th largest c; min b, below every c, where there is none (k == E); 0 in invalid rows
  View invalid;  // (1) i64: rows with a non-finite logit are added to it
  // (T, E): s of every expert. Only softmax without renormalisation, whose gradient reaches every logit; else absent.
  View all_scores = {};
};
struct OutputGrads {
  View weights;  // (T, k)
};
struct Grads {
  View logits;  // (T, E); overwritten, zero off the selected (softmax without renormalisation: everywhere) and in
                // invalid rows
};

Costs costs(const Dims&, DType, Pass, Device back_end = Device::cpu);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Outputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::router
