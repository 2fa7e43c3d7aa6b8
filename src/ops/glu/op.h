// Gated linear units: h = act(gate) o lift(up), the non-linearity of every FFN and expert.
//
//   SwiGLU    h = g sigmoid(g) * v
//   SiTU-GLU  h = [b1 tanh(g / b1) sigmoid(g)] * [b2 tanh(v / b2)],  b1 = 4, b2 = 25: |h| < 100 whatever comes in
//
// Source: moe.md 4 (values, derivatives and the cancellations to avoid). math.h and cuda/math.h beside this file hold
// the scalar functions, which the expert products fuse.
#pragma once

#include "core/context.h"

namespace tessera::ops::glu {

enum class Kind : uint8_t { swiglu, situ };

struct Activation {
  Kind kind = Kind::swiglu;
  double gate_cap = 4;  // b1; SiTU only
  double up_cap = 25;   // b2; SiTU only; 0: the up branch stays linear
};

struct Dims {
  int64_t rows, width;  // (T, F)
  Activation activation;
};
struct Inputs {
  View gate, up;  // (T, F) each
};
struct Outputs {
  View h;  // (T, F)
};
struct OutputGrads {
  View h;  // (T, F)
};
struct Grads {
  View gate, up;  // (T, F) each; overwritten; each may be the same memory as an Input or as OutputGrads::h
};

Costs costs(const Dims&, DType, Pass);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::glu
