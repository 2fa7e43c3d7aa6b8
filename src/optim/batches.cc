#include "optim/batches.h"

#include <algorithm>
#include <map>

#include "ops/gemm/cuda.h"
#include "optim/chunks.h"

namespace tessera::optim {
namespace {

int64_t square_elements(const Matrix& m) {
  const int64_t n = std::min(m.rows, m.cols);
  return n * n;
}

int64_t blocks_at_once(const Matrix& m) {
  const int64_t bytes = 2 * (m.elements() + square_elements(m)) * bytes_of(DType::bf16);
  return std::clamp<int64_t>(kBatchBytes / bytes, 1, kBatchBlocks);
}

struct Sizes {
  int64_t matrices = 0, squares = 0, chunks = 0, blocks = 0;
};

Sizes sizes_of(std::span<const Batch> batches) {
  Sizes s;
  for (const Batch& b : batches) {
    s.matrices = std::max(s.matrices, b.blocks * b.shape.elements());
    s.squares = std::max(s.squares, b.blocks * square_elements(b.shape));
    s.chunks = std::max(s.chunks, b.blocks * chunks_of(b.shape.elements()));
    s.blocks = std::max(s.blocks, b.blocks);
  }
  return s;
}

}  // namespace

Matrix block_of(const Slot& s) {
  const int64_t cols = s.value.dim(s.value.rank() - 1);
  return {cols == 0 ? 0 : s.value.elements() / s.blocks / cols, cols};
}

std::vector<Batch> batches_of(std::span<const Slot> slots) {
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> by_shape;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].rule != Rule::muon || slots[i].value.elements() == 0) continue;
    const Matrix m = block_of(slots[i]);
    by_shape[{m.rows, m.cols}].push_back(i);
  }
  std::vector<Batch> batches;
  for (const auto& [shape, members] : by_shape) {
    const Matrix matrix{shape.first, shape.second};
    const int64_t limit = blocks_at_once(matrix);
    batches.push_back({matrix, {}});
    for (const size_t slot : members) {
      for (int64_t first = 0; first < slots[slot].blocks;) {
        if (batches.back().blocks == limit || batches.back().runs.size() == kBatchRuns) {
          batches.push_back({matrix, {}});
        }
        Batch& batch = batches.back();
        const int64_t count = std::min(slots[slot].blocks - first, limit - batch.blocks);
        batch.runs.push_back({slot, first, count});
        batch.blocks += count;
        first += count;
      }
    }
  }
  return batches;
}

BatchWorkspace allocate_batch_workspace(Arena& arena, std::span<const Batch> batches) {
  const Sizes s = sizes_of(batches);
  return {.x = arena.allocate(DType::bf16, {s.matrices}),
          .next = arena.allocate(DType::bf16, {s.matrices}),
          .a = arena.allocate(DType::bf16, {s.squares}),
          .b = arena.allocate(DType::bf16, {s.squares}),
          .sums = arena.allocate(DType::f64, {2 * s.chunks}),
          .squares = arena.allocate(DType::f64, {2 * s.blocks}),
          .product = ops::gemm_workspace(arena)};
}

int64_t batch_workspace_bytes(std::span<const Batch> batches) {
  if (batches.empty()) return 0;
  Arena arena = Arena::dry();
  allocate_batch_workspace(arena, batches);
  return arena.used();
}

}  // namespace tessera::optim
