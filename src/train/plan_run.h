// What a run file asks of memory, before anything is allocated, and what would make it fit. `train` refuses by the same
// plan that `tessera plan memory` prints.
#pragma once

#include <string>
#include <vector>

#include "train/memory_plan.h"

namespace tessera::train {

bool has_store(const RunConfig&);

// From the batches that lie before the run. Without its token store from batches as `assumed` in the result: every
// document is a sequence of data.context tokens.
struct RunPlan {
  MemoryPlan memory;
  bool assumed = false;
};
RunPlan plan_run(const RunConfig&);

// Settings that make a run fit, by really planning it with them. Those that cost least time come first.
struct Change {
  std::string settings;  // "train.micro_tokens = 8192, train.recompute_all = true"
  MemoryPlan memory;
};
std::vector<Change> cheapest_changes(const RunConfig&, int64_t usable_bytes);

void require_memory(const MemoryPlan&, const RunConfig&);  // UserError: this machine has less

}  // namespace tessera::train
