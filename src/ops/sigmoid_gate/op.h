// Sigmoid gate: y = x o sigmoid(w). The output gates of KDA and of gated MLA (attention.md 1 and 9).
#pragma once

#include "core/context.h"

namespace tessera::ops::sigmoid_gate {

struct Dims {
  int64_t rows, width;  // (R, W)
};
struct Inputs {
  View x;  // (R, W)
  View w;  // (R, W): the gate before the sigmoid
};
struct Outputs {
  View y;  // (R, W)
};
struct OutputGrads {
  View y;  // (R, W)
};
struct Grads {
  View x;  // (R, W); overwritten; may be the same memory as OutputGrads::y
  View w;  // (R, W); overwritten
};

Costs costs(const Dims&, DType, Pass);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::sigmoid_gate
