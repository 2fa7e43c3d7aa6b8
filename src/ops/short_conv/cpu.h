#pragma once

#include "ops/short_conv/op.h"

namespace tessera::ops::short_conv::cpu {

inline constexpr int64_t kMaxWidth = 8;

// The weight gradient is summed over this many fixed ranges of tokens, then over the ranges in order: the same bits for
// any number of threads.
inline constexpr int64_t kPartials = 16;

// Rows of G channels lie a few more than G apart: see row_stride in cpu.cc.
struct Workspace {
  View taps;      // (W, G): the weight with channels innermost
  View zeros;     // (G): the history before a document without an initial window
  View d_taps;    // (kPartials, W, G); backward only
  View d_linear;  // (kPartials, W, G): gradients of a of the last W tokens; backward only
};

Workspace allocate_forward(Arena&, const Dims&, DType);
Workspace allocate_backward(Arena&, const Dims&, DType);
int64_t forward_workspace(const Dims&, DType);   // bytes
int64_t backward_workspace(const Dims&, DType);  // bytes

void forward(const Dims&, const Inputs&, const Outputs&, const Workspace&);
void backward(const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Workspace&);

}  // namespace tessera::ops::short_conv::cpu
