// L2 norm: y = x r, r = 1 / sqrt(sum(x^2) + 1e-6), the epsilon INSIDE the root, over the last index.
//
// Source: attention.md 1.2. For the keys and queries of KDA (rows are tokens x heads). A zero row gives y = 0, r =
// 1000.
#pragma once

#include "core/context.h"

namespace tessera::ops::l2_norm {

inline constexpr double kEpsilon = 1e-6;

struct Dims {
  int64_t rows, width;  // (R, W)
};
struct Inputs {
  View x;  // (R, W)
};
struct Outputs {
  View y;  // (R, W); may be the same memory as x
};
struct Saved {
  View rnorm;  // (R), exact_type: r; together with y all that backward needs
};
struct OutputGrads {
  View y;  // (R, W)
};
struct Grads {
  View x;  // (R, W); overwritten; may be the same memory as OutputGrads::y
};

Costs costs(const Dims&, DType, Pass);
Saved allocate_saved(Context&, const Dims&, DType);

void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);  // Saved null: inference
void backward(Context&, const Dims&, const Outputs&, const Saved&, const OutputGrads&, const Grads&);

}  // namespace tessera::ops::l2_norm
