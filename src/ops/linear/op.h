// Linear: y = x W^T, no bias. The matrix product of every projection; W is (out, in) as published checkpoints store it.
//
// Beside x of type t, weight and y are of type t; or both exact_type(t), for the router, whose scores bf16 would spoil
// (a product of float32 then, in which no operand is rounded); or, forward only, y alone is exact_type(t): logits.
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
  View y;  // (T, out), any row stride; type of the weight
};
struct Grads {
  View x;                 // (T, in), any row stride; type of x; absent: not wanted
  bool add_to_x = false;  // add instead of overwrite: x feeds several projections
  View weight;            // (out, in), exact_type; added to; absent: not wanted
};
struct Types {
  DType x, weight, y;
};

// `product` decides the precision of the operands on a CPU (Context::product); the router passes Product::f32 always.
Costs costs(const Dims&, const Types&, Pass, Product, Device back_end = Device::cpu);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::linear
