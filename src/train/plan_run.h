// What a run file asks of memory, before anything is allocated, and what would make it fit. `train` refuses by the same
// plan that `tessera plan memory` prints.
#pragma once

#include <string>
#include <vector>

#include "train/memory_plan.h"

namespace tessera::train {

bool has_store(const RunConfig&);

// Of the process of [parallel] that needs most. Among equal sequences that is the first, which takes the largest
// matrices to train, or the last, which has the larger range of experts and the keys of all others. With the documents
// of a store every process of up to 8 is planned; of more, those two, and one between them may need a percent or two
// more.
struct RunPlan {
  MemoryPlan memory;
  bool assumed = false;
  int64_t rank = 0;
};
// From the batches that lie before the run. Without its token store from `assumed` ones: every document is a sequence
// of data.context tokens.
RunPlan plan_run(const RunConfig&);
RunPlan assumed_plan(const RunConfig&);

// How many of the run's processes are on one machine, and share its memory and its threads where they compute on CPUs.
int64_t processes_of_machine(const RunConfig&);

// Settings that make a run fit, by really planning it with them. Those that cost least time come first.
struct Change {
  std::string settings;  // "train.micro_tokens = 8192, train.recompute_all = true"
  MemoryPlan memory;
};
std::vector<Change> cheapest_changes(const RunConfig&, int64_t usable_bytes);

// UserError: this machine has less. `sharing`: processes of the run that take as much of it.
void require_memory(const MemoryPlan&, const RunConfig&, int64_t sharing);

}  // namespace tessera::train
