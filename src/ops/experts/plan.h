// How the rows of a batch are cut into items of work, and the memory that takes. Functions of the shapes (for memory)
// and of the rows of each expert (for the cut), never of timing or of the number of threads, so the bits of a result
// are always the same.
//
// Threads work on different items and each product runs on one thread: experts are many and small, and oneDNN's start
// of a threaded product (some 10 us) is as long as a small product itself. A block of 256 rows keeps a thread's
// operands of common sizes in its second-level cache (at L = F = 256: 0.25 MB each), and products of 128 rows and more
// run at the machine's full rate.
#pragma once

#include <algorithm>

#include "core/parallel.h"
#include "ops/experts/op.h"
#include "ops/gemm/gemm.h"

namespace tessera::ops::experts {

inline constexpr int64_t kBlockRows = 256;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

inline int64_t rows_of(const Dims& d) { return d.tokens * d.top_k; }

// Rows of a product are padded with zeros to a multiple of this. For bf16 every new shape makes oneDNN compile a
// kernel, and the rows of an expert change each step: with padding there are kBlockRows / 64 shapes.
constexpr int64_t row_unit(DType dtype, Product product) {
  return dtype == DType::f32 && product == Product::bf16 ? 64 : 1;
}

// Most rows of one block, padding included.
inline int64_t block_capacity(const Dims& d, int64_t unit) {
  return std::min(kBlockRows, round_up(std::max<int64_t>(rows_of(d), 1), unit));
}

inline int64_t block_count(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Rows of each block but the last, so that the last is not a sliver.
inline int64_t block_rows(int64_t rows, int64_t unit) {
  return round_up((rows + block_count(rows) - 1) / block_count(rows), std::max<int64_t>(unit, 8));
}

// Backward gives an item all rows of one expert, so that its weight gradients have one writer. An expert with more than
// an eighth of all rows would leave the other threads idle: its rows are cut into segments, and every segment but the
// first sums into a buffer of its own, added at the end in order.
inline int64_t segment_rows(const Dims& d) { return std::max<int64_t>(1024, (rows_of(d) + 7) / 8); }
inline int64_t max_partials(const Dims& d) { return std::max<int64_t>(rows_of(d) - 1, 0) / segment_rows(d); }
inline int64_t max_items(const Dims& d) { return d.experts + max_partials(d); }

// Scratch of one thread: reals for the operands of a block, bytes for rounded copies.
inline int64_t scratch_reals(const Dims& d, Pass pass, int64_t unit) {
  const int64_t width = pass == Pass::forward ? d.width + 2 * d.hidden : 2 * d.width + 3 * d.hidden;
  return round_up(block_capacity(d, unit) * width, Arena::kAlignment);
}
inline int64_t scratch_bytes(const Dims& d, DType dtype, Product product) {
  if (dtype != DType::f32) return 0;
  const int64_t rows = block_capacity(d, row_unit(dtype, product));
  return std::max({gemm_scratch_bytes(product, rows, d.hidden, d.width),    // gate, up, t
                   gemm_scratch_bytes(product, rows, d.width, d.hidden),    // down, dx
                   gemm_scratch_bytes(product, d.width, d.hidden, rows),    // dW2
                   gemm_scratch_bytes(product, d.hidden, d.width, rows)});  // dW1, dW3
}

}  // namespace tessera::ops::experts
