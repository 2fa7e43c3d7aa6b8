// Attention Residuals: a sublayer reads a softmax mix over depth of everything before it, not only their sum.
//
//   a_i = < query, gain o v_i / rms(v_i) >;   alpha = softmax_i(a);   h = sum_i alpha_i v_i     per token
//
// v_i are the sources: the embedding, the sums of completed blocks, and the running partial sum (block form), or every
// sublayer's output (full form); which, is the model's business. Source: moe.md 5 (5.4 backward); arXiv 2603.15031.
#pragma once

#include <vector>

#include "core/context.h"

namespace tessera::ops::attn_res {

struct Dims {
  int64_t tokens, width, sources;  // T, D, S
  double eps;                      // of the root mean square
};
struct Inputs {
  std::vector<View> sources;  // S of (T, D)
  View query, gain;           // (D) each, exact_type
};
struct Outputs {
  View h;  // (T, D)
};
struct Saved {
  View alpha, rrms, score;  // (T, S) each, exact_type: softmax weight, 1 / rms(v_i), a_i
};
struct OutputGrads {
  View h;  // (T, D)
};
struct Grads {
  std::vector<View> sources;  // S of (T, D); each its own memory; ADDED to: a source feeds many mixes
  View query, gain;           // (D), exact_type; added to
};

Costs costs(const Dims&, DType, Pass, Device back_end = Device::cpu);
Saved allocate_saved(Context&, const Dims&, DType);

void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);  // Saved null: inference
void backward(Context&, const Dims&, const Inputs&, const Outputs&, const Saved&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::attn_res
