#pragma once

#include "ops/cross_entropy/op.h"

namespace tessera::ops::cross_entropy::cpu {

struct Workspace {
  View logits;   // (min(block_rows, T), vocabulary); becomes the gradient of the logits in place
  View scratch;  // of the products
};

void forward(const Dims&, const Inputs&, const Outputs&, Product, const Workspace&);
void forward_backward(const Dims&, const Inputs&, double scale, const Outputs&, const Grads&, Product,
                      const Workspace&);

}  // namespace tessera::ops::cross_entropy::cpu
