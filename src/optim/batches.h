// Muon on the GPU takes blocks of one shape together, from any slots: a head of 128 rows alone would leave most of the
// chip idle. A batch is as many as keep its matrices within kBatchBytes (at least one), so that the workspace does not
// grow with the model.
#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

struct Matrix {
  int64_t rows, cols;
  int64_t elements() const { return rows * cols; }
};
Matrix block_of(const Slot&);

struct Run {  // neighbouring blocks of a slot
  size_t slot;
  int64_t first, count;
};

struct Batch {
  Matrix shape;
  std::vector<Run> runs;
  int64_t blocks = 0;  // of all runs
};

inline constexpr int64_t kBatchBytes = int64_t{256} << 20;
inline constexpr int64_t kBatchBlocks = 4096;
inline constexpr size_t kBatchRuns = 48;  // a kernel is given them as its parameter

std::vector<Batch> batches_of(std::span<const Slot>);  // of the slots with Rule::muon; empty blocks are left out

// In bf16, but for the sums in float64. Sizes are the largest of all batches.
struct BatchWorkspace {
  View x, next;        // matrices of the batch
  View a, b;           // (n, n) of each, n = min(rows, cols)
  View sums, squares;  // of squares: of each chunk, of each block; then the same for counts of chunks with a gradient
  View product;
};
BatchWorkspace allocate_batch_workspace(Arena&, std::span<const Batch>);
int64_t batch_workspace_bytes(std::span<const Batch>);

}  // namespace tessera::optim
