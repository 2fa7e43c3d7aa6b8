// What the CUDA back end takes from the arena. Not among the kernels, since a dry run plans it in any build.
#include <algorithm>

#include "ops/experts/cuda.h"
#include "ops/experts/plan.h"

namespace tessera::ops::experts::cuda {

int64_t row_capacity(const Dims& d) {
  const int64_t slots = rows_of(d), used = std::min(d.experts, slots);
  return (slots + used * (kBlockRows - 1)) / kBlockRows * kBlockRows;
}

Saved allocate_saved(Arena& arena, const Dims& d, DType dtype) {
  const int64_t rows = row_capacity(d);
  return {.slots = arena.allocate(DType::i64, {rows}),
          .offsets = arena.allocate(DType::i64, {d.experts + 1}),
          .gate = arena.allocate(dtype, {rows, d.hidden}),
          .up = arena.allocate(dtype, {rows, d.hidden}),
          .rows = arena.allocate(DType::i64, {rows_of(d)}),
          .counts = arena.allocate(DType::i64, {d.experts}),
          .blocks = arena.allocate(DType::i32, {rows / kBlockRows})};
}

ForwardWorkspace allocate_forward(Arena& arena, const Dims& d, DType dtype) {
  const int64_t rows = row_capacity(d);
  return {.chunks = arena.allocate(DType::i32, {(rows_of(d) + kChunkSlots - 1) / kChunkSlots, d.experts}),
          .x = arena.allocate(dtype, {rows, d.width}),
          .h = arena.allocate(dtype, {rows, d.hidden}),
          .squares = arena.allocate(DType::f64, {d.experts, kSquareParts})};
}

BackwardWorkspace allocate_backward(Arena& arena, const Dims& d, DType dtype) {
  const Shape latent{row_capacity(d), d.width}, hidden{row_capacity(d), d.hidden};
  return {.x = arena.allocate(dtype, latent),
          .dy = arena.allocate(dtype, latent),
          .t = arena.allocate(dtype, hidden),
          .dup = arena.allocate(dtype, hidden),
          .h = arena.allocate(dtype, hidden)};
}

}  // namespace tessera::ops::experts::cuda
