#pragma once

#include "ops/embedding/op.h"

namespace tessera::ops::embedding::cuda {

inline constexpr int64_t kDigits = 256;     // of one pass of the sort: 8 bits of the id
inline constexpr int64_t kSortTile = 2048;  // tokens of one block of the sort
inline constexpr int64_t kSumTile = 64;     // sorted tokens that one thread adds

// Of the backward. The sums of a tile whose id goes on over the tile's border wait in `leading` and `trailing`.
struct Workspace {
  View ids, tokens;  // (2, T) i32: sorted by id, the two sides of a pass of the sort
  View counts;       // (kDigits, sort tiles) i32
  View leading;      // (sum tiles, D) f32: of the first id, which began in an earlier tile
  View trailing;     // (sum tiles, D) f32: of the last id, which began in this tile and goes on in the next
};

inline Workspace allocate(Arena& arena, const Dims& d) {
  const auto tiles = [&](int64_t tile) { return (d.tokens + tile - 1) / tile; };
  return {arena.allocate(DType::i32, {2, d.tokens}), arena.allocate(DType::i32, {2, d.tokens}),
          arena.allocate(DType::i32, {kDigits, tiles(kSortTile)}),
          arena.allocate(DType::f32, {tiles(kSumTile), d.width}),
          arena.allocate(DType::f32, {tiles(kSumTile), d.width})};
}
inline int64_t workspace_bytes(const Dims& d) {
  Arena arena = Arena::dry();
  allocate(arena, d);
  return arena.used();
}

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&);
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Workspace&);

}  // namespace tessera::ops::embedding::cuda
