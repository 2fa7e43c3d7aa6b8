#pragma once

#include "ops/experts/op.h"

namespace tessera::ops::experts::cuda {

inline constexpr int64_t kBlockRows = 128;    // an expert's rows are padded to whole blocks of these
inline constexpr int64_t kChunkSlots = 1024;  // slots that one warp sorts
inline constexpr int kSquareParts = 16;       // blocks that add up one expert's squares

// R: rows of the worst routing. n slots on u experts leave at most u (kBlockRows - 1) rows of padding.
int64_t row_capacity(const Dims&);

struct ForwardWorkspace {
  View chunks;   // (slots / kChunkSlots, E) i32: of the sort
  View x;        // (R, L): gathered rows, then the experts' outputs
  View h;        // (R, F)
  View squares;  // (E, kSquareParts) f64
};
struct BackwardWorkspace {
  View x, dy;      // (R, L): gathered rows; dy then becomes dx by row
  View t, dup, h;  // (R, F): t becomes dgate; h is weighted, p h
};

Saved allocate_saved(Arena&, const Dims&, DType);
ForwardWorkspace allocate_forward(Arena&, const Dims&, DType);
BackwardWorkspace allocate_backward(Arena&, const Dims&, DType);

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Saved&, const ForwardWorkspace&);
void backward(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
              const BackwardWorkspace&);

// The products alone, `times` in a row, for benchmarks: forward's, or backward's on what forward left. Values are of a
// real run's size; sort and gather are done once.
void repeat_forward_products(GpuStream, const Dims&, const Inputs&, const Saved&, const ForwardWorkspace&, int times);
void repeat_backward_products(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
                              const BackwardWorkspace&, int times);

}  // namespace tessera::ops::experts::cuda
