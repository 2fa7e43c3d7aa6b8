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
  View weight;  // (vocabulary, D); added to, rows in order of the tokens
};

Costs costs(const Dims&, DType, Pass);

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
void backward(Context&, const Dims&, const Inputs&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::embedding
