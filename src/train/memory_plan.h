// What a run takes on this machine: the batches and evaluations that lie before it, run dry.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "model/model.h"
#include "train/run_config.h"

namespace tessera::train {

struct MemoryPlan {
  int64_t static_bytes = 0;  // parameters, gradients, optimizer state, counters, batch buffers
  int64_t planned_peak = 0;  // with the activations of the batches and evaluations to come
  int64_t capacity = 0;      // taken: on the host address space for the worst packing, on the GPU the planned batches
};

// Of many batches the few that can set the peak. Ops take memory by tokens, by documents, and by pieces of documents of
// at most 16 to 256 tokens (chunks, blocks of queries). A batch that has no more of any of these than another one needs
// no more memory and is dropped, so that a run of any length leaves a few dozen to run dry.
class LargestBatches {
 public:
  void add(std::span<const int64_t> offsets);
  int64_t count() const { return static_cast<int64_t>(kept_.size()); }
  const std::vector<int64_t>& offsets(int64_t i) const { return kept_[static_cast<size_t>(i)].offsets; }

 private:
  static constexpr std::array<int64_t, 7> kPieceTokens{1, 16, 32, 64, 128, 256, int64_t{1} << 62};
  using Counts = std::array<int64_t, kPieceTokens.size()>;
  struct Kept {
    Counts counts;
    std::vector<int64_t> offsets;
  };
  std::vector<Kept> kept_;
};

// `routers`: as trained now; what the guard may yet ask of them is in the capacity.
MemoryPlan plan_memory(const model::Model&, const RunConfig&, const std::vector<model::RouterOptions>& routers,
                       const LargestBatches& training, const LargestBatches& evaluation);
void require_memory(const MemoryPlan&, const RunConfig&);  // UserError: this machine has less

}  // namespace tessera::train
