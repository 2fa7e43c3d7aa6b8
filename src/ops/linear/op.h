// Linear: y = x W^T, no bias. The matrix product of every projection; W is (out, in) as published checkpoints store it.
#pragma once

#include "core/context.h"

namespace tessera::ops::linear {

struct Dims {
  int64_t tokens, in, out;
};
struct Inputs {
  View x;       // (T, in), any row stride
  View weight;  // (out, in)
};
struct Outputs {
  View y;  // (T, out), any row stride
};
struct OutputGrads {
  View y;  // (T, out), any row stride
};
struct Grads {
  View x;                 // (T, in), any row stride; absent: not wanted
  bool add_to_x = false;  // add instead of overwrite: x feeds several projections
  View weight;            // (out, in); added to; absent: not wanted
};

// `product` decides the precision of the operands (Context::product); the router passes Product::f32 always.
Costs costs(const Dims&, DType, Pass, Product);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::linear
