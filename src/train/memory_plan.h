// What a run takes: the batches and evaluations that lie before it, run dry.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "model/model.h"
#include "train/run_config.h"

namespace tessera::train {

struct MemoryUse {
  enum class Kind : uint8_t { state, activations, workspace };  // held for the whole run; by layers; during one op
  std::string what;
  Kind kind;
  int64_t at_peak_bytes = 0;  // they add up to the planned peak
  int64_t most_bytes = 0;     // at any time
};

struct MemoryPlan {
  int64_t static_bytes = 0;    // parameters, gradients, optimizer state, counters, batch buffers
  int64_t gradient_bytes = 0;  // of them
  int64_t planned_peak = 0;    // with the activations of the batches and evaluations to come
  int64_t capacity = 0;        // taken: on the host address space for the worst packing, on the GPU the planned batches
  std::vector<MemoryUse> uses = {};  // largest first

  // The 30 % rule: parameters, optimizer state and buffers leave 30 % of what is usable, and the peak leaves 5 %.
  static constexpr double kMostState = 0.70, kMostPeak = 0.95;
  bool fits(int64_t usable_bytes) const;
};

// Of many batches the few that can set the peak. Ops take memory by tokens, by documents, and by pieces of documents of
// at most 16 to 256 tokens (chunks, blocks of queries). A batch that has no more of any of these than another one needs
// no more memory and is dropped, so that a run of any length leaves a few dozen to run dry. Where tokens are cut among
// processes, what this one has of the batch is counted, with the keys that it reads and whether documents cross.
class LargestBatches {
 public:
  void add(std::span<const int64_t> offsets, dist::Mesh* mesh = nullptr);
  int64_t count() const { return static_cast<int64_t>(kept_.size()); }
  const std::vector<int64_t>& offsets(int64_t i) const { return kept_[static_cast<size_t>(i)].offsets; }

 private:
  static constexpr std::array<int64_t, 7> kPieceTokens{1, 16, 32, 64, 128, 256, int64_t{1} << 62};
  using Counts = std::array<int64_t, 2 * kPieceTokens.size() + 3>;
  struct Kept {
    Counts counts;
    std::vector<int64_t> offsets;
  };
  std::vector<Kept> kept_;
};

// `routers`: as trained now; what the guard may yet ask of them is in the capacity.
MemoryPlan plan_memory(const model::Model&, const RunConfig&, const std::vector<model::RouterOptions>& routers,
                       const LargestBatches& training, const LargestBatches& evaluation);
// What a run on this device may take here.
int64_t usable_bytes(Device);

}  // namespace tessera::train
