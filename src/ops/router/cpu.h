#pragma once

#include "ops/router/op.h"

namespace tessera::ops::router::cpu {

// Scratch of each thread: reals (threads, s and c of a row | list of k + 1 | groups) and the list's indices.
struct Workspace {
  View reals, indices;
};
Shape reals_shape(const Dims&);
Shape indices_shape(const Dims&);

void forward(const Dims&, const Inputs&, const Outputs&, const Workspace&);
void backward(const Dims&, const Outputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::router::cpu
