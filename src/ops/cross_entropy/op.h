// Output head and cross-entropy in one op, in blocks of rows: the (T, vocabulary) logits never exist at once.
//
//   loss_t = logsumexp(x_t W^T) - (x_t W^T)[target_t]
//
// In training the gradient is taken in the same pass over a block, so each block's logits are computed once. Beside
// bf16 activations logits are exact_type, and their gradient is rounded to bf16 for the products that read it.
#pragma once

#include "core/context.h"

namespace tessera::ops::cross_entropy {

struct Dims {
  int64_t tokens, width, vocabulary;  // T, D, -
  int64_t block_rows = 1024;          // rows whose logits exist at a time
};
struct Inputs {
  View x;        // (T, D)
  View weight;   // (vocabulary, D)
  View targets;  // (T) i32; -1: no loss for this row. Outside the vocabulary: an Error; on the GPU, which is not waited
                 // for, NaN as loss and gradient
};
struct Outputs {
  View loss;  // (T), exact_type, nats; 0 where the target is -1
};
struct Grads {
  View x;       // (T, D); overwritten; zero rows where the target is -1
  View weight;  // (vocabulary, D), exact_type; added to
};

Costs costs(const Dims&, DType, Pass, Product, Device back_end = Device::cpu);  // Pass::backward: forward_backward

void forward(Context&, const Dims&, const Inputs&, const Outputs&);
// Gradients of `scale` times the sum of all losses.
void forward_backward(Context&, const Dims&, const Inputs&, double scale, const Outputs&, const Grads&);

}  // namespace tessera::ops::cross_entropy
