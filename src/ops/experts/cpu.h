#pragma once

#include "ops/experts/op.h"

namespace tessera::ops::experts::cpu {

struct ForwardWorkspace {
  View slots, offsets;  // those of Saved, or workspace where nothing is saved
  View cursor, blocks;  // (E + 1) i64 each: of the sort; first block of each expert
  View y;               // (T k, L): expert outputs by slot
  View reals, bytes;    // (threads, ...): scratch
};
struct BackwardWorkspace {
  View items;         // (max_items, 4) i64
  View partials;      // (max_partials, 3 F L): weight gradients of further segments
  View dx;            // (T k, L): by slot
  View reals, bytes;  // (threads, ...): scratch
};

void forward(const Dims&, Product, const Inputs&, const Outputs&, Saved*, const ForwardWorkspace&);
void backward(const Dims&, Product, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
              const BackwardWorkspace&);

}  // namespace tessera::ops::experts::cpu
