// Short convolution: depthwise, causal, width W (4), then SiLU. History never crosses a document boundary.
//
//   a_t = sum_j w[j] x_{t-W+1+j},   y_t = a_t sigmoid(a_t);   w[W-1] multiplies the current token
//
// Source: attention.md 1.1. Decode is this op with documents of one token and windows carried from step to step.
#pragma once

#include "core/context.h"
#include "core/documents.h"

namespace tessera::ops::short_conv {

struct Dims {
  int64_t tokens, channels, width;  // (T, G, W)
};
struct Inputs {
  View x;       // (T, G)
  View weight;  // (G, W), exact_type: the published [G, 1, W]
  // (N, W-1, G): inputs before each document's first token, oldest first; absent: zeros. (1, W-1, G): before the first
  // document's, zeros before the others', as where a pack is cut over ranks.
  View initial_window;
  Documents documents;
};
struct Outputs {
  View y;             // (T, G)
  View final_window;  // (N, W-1, G): to be given as the next initial_window; absent: not wanted; may be initial_window
                      // of all
};
struct OutputGrads {
  View y;  // (T, G)
};
struct Grads {
  View x;               // (T, G); overwritten
  View weight;          // (G, W), exact_type; added to
  View initial_window;  // (N or 1, W-1, G); overwritten; absent: not wanted
};

Costs costs(const Dims&, DType, Pass, Device back_end = Device::cpu);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);                     // saves nothing:
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);  // a is recomputed

}  // namespace tessera::ops::short_conv
