#pragma once

#include "ops/linear/op.h"

namespace tessera::ops::linear::cuda {

// Rows of x whose products with parts of a weight exist at a time: a million would take gigabytes.
inline constexpr int64_t kSplitRows = 16384;
// Parts begin at multiples of 16 bytes.
inline int64_t padded_out(const Dims& d) { return (d.out + 7) / 8 * 8; }

// But for the first, empty where the types of x and the weight are equal.
struct Workspace {
  View product;  // gemm_workspace()
  View weight;   // (parts times padded out, in) bf16: 3 parts, 4 in backward
  View dy;       // (min(kSplitRows, T), 4 padded out) bf16, backward
  View sums;     // f32: forward (min(kSplitRows, T), 3 padded out), backward (3 padded out, in)
};

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Workspace&);
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Workspace&);

}  // namespace tessera::ops::linear::cuda
