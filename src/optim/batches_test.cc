#include "optim/batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "ops/gemm/cuda.h"

namespace tessera::optim {
namespace {

Slot shape_only(const std::string& name, const tessera::Shape& shape, int64_t blocks, Rule rule = Rule::muon) {
  const View value(nullptr, DType::f32, shape);
  return {.name = name, .value = value, .gradient = value, .rule = rule, .blocks = blocks};
}

// Every block of every slot with Rule::muon is in one batch, beside blocks of its own shape, within the limits.
void expect_whole(const std::vector<Slot>& slots, const std::vector<Batch>& batches) {
  std::map<std::pair<size_t, int64_t>, int> seen;
  for (const Batch& batch : batches) {
    int64_t blocks = 0;
    EXPECT_LE(batch.runs.size(), kBatchRuns);
    for (const Run& run : batch.runs) {
      const Matrix m = block_of(slots[run.slot]);
      EXPECT_EQ(m.rows, batch.shape.rows);
      EXPECT_EQ(m.cols, batch.shape.cols);
      for (int64_t b = run.first; b < run.first + run.count; ++b) ++seen[{run.slot, b}];
      blocks += run.count;
    }
    EXPECT_EQ(batch.blocks, blocks);
    EXPECT_GT(blocks, 0);
    const int64_t n = std::min(batch.shape.rows, batch.shape.cols);
    EXPECT_TRUE(blocks == 1 || 4 * blocks * (batch.shape.elements() + n * n) <= kBatchBytes);
    EXPECT_LE(blocks, kBatchBlocks);
  }
  size_t wanted = 0;
  for (const Slot& s : slots) wanted += s.rule == Rule::muon && s.value.elements() > 0 ? size_t(s.blocks) : 0;
  EXPECT_EQ(seen.size(), wanted);
  for (const auto& [block, times] : seen) EXPECT_EQ(times, 1) << "slot " << block.first << " block " << block.second;
}

TEST(Batches, BlocksOfOneShapeGoTogether) {
  const std::vector<Slot> slots{shape_only("q", {4 * 16, 24}, 4),          shape_only("other", {16, 40}, 1),
                                shape_only("vector", {5}, 1, Rule::adamw), shape_only("experts", {3, 16, 24}, 3),
                                shape_only("none", {0, 16, 24}, 1),        shape_only("wide", {24, 16}, 1)};
  const std::vector<Batch> batches = batches_of(slots);
  expect_whole(slots, batches);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0].blocks, 7);  // (16, 24) of two slots
  EXPECT_EQ(batches[0].runs.size(), 2u);
}

TEST(Batches, AreBoundedInBytesBlocksAndRuns) {
  // 896 experts of 3072 x 3584 (two or three fit), one matrix larger than the bound, 10,000 tiny blocks, 200 slots.
  std::vector<Slot> slots{shape_only("experts", {896, 3072, 3584}, 896), shape_only("large", {16384, 16384}, 1),
                          shape_only("tiny", {10000, 8}, 10000)};
  for (int i = 0; i < 200; ++i) slots.push_back(shape_only("o." + std::to_string(i), {128, 64}, 2));
  expect_whole(slots, batches_of(slots));
}

TEST(Batches, WorkspaceDoesNotGrowWithTheModel) {
  const auto bytes = [](int64_t experts) {
    const std::vector<Slot> slots{shape_only("experts", {experts, 3072, 3584}, experts)};
    return batch_workspace_bytes(batches_of(slots));
  };
  EXPECT_EQ(bytes(16), bytes(896));
  EXPECT_LE(bytes(896), kBatchBytes + ops::kGemmWorkspaceBytes + (1 << 16));
  EXPECT_EQ(bytes(0), 0);
}

}  // namespace
}  // namespace tessera::optim
