// Embedding: y_t = W[id_t].
#pragma once

#include "core/context.h"

namespace tessera::ops::embedding {

struct Dims {
  int64_t tokens, vocabulary, width;  // (T, -, D)
};
struct Inputs {
  View ids;     // (T) i32, each in [0, vocabulary): checked where tokens enter (data, prompts), not here
  View weight;  // (vocabulary, D)
};
struct Outputs {
  View y;  // (T, D)
};
struct OutputGrads {
  View y;  // (T, D)
};
struct Grads {
  // (vocabulary, D), exact_type; added to, in an order that follows from the ids: that of the tokens on the CPU, on the
  // GPU in two levels.
  View weight;
};

Costs costs(const Dims&, DType, Pass, Device back_end = Device::cpu);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::embedding
