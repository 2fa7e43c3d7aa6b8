// What `tessera plan layout` proposes: every way in which a number of processes can share a run, with what each takes
// of memory, of the network and of time.
//
// A layout is legal where the run file may have it (RunConfig::check), with the run's own micro-batches or, where these
// do not go round, the largest smaller ones that do; and where no process would be left with next to no tokens. Memory
// is planned as for one process (plan_run.h), products by a dry run of the busiest process with balanced routing,
// exchanges by the formulas of traffic.h and the links of network.h. Documents are sequences of data.context tokens.
// Heads are cut inside a node alone, and a pipeline's processes have one run of layers each.
#pragma once

#include <string>
#include <vector>

#include "train/network.h"
#include "train/plan_run.h"

namespace tessera::train {

struct LayoutPlan {
  dist::Layout layout;
  int64_t micro_tokens = 0;  // as in the run file, or less
  MemoryPlan memory;         // of the process that needs most
  bool fits = false;
  double inside = 0, across = 0;                                       // bytes of a step, of all processes
  double product_seconds = 0, exchange_seconds = 0, idle_seconds = 0;  // idle: while a pipeline fills and drains
  std::string why;  // of the first: it wins; of the others: what they lose

  double seconds() const { return product_seconds + exchange_seconds + idle_seconds; }
};

struct LayoutPlans {
  std::vector<LayoutPlan> legal;     // those that fit first, the fastest first
  std::vector<std::string> refused;  // why the others are not legal, one each
};

LayoutPlans plan_layouts(const RunConfig&, int64_t processes, const Target&);

// The numbers of processes nearest to this one that have a legal layout: at most one below and one above.
std::vector<int64_t> nearest_processes(const RunConfig&, int64_t processes);

// The lines of a run file.
std::string parallel_lines(const LayoutPlan&, const RunConfig&);

}  // namespace tessera::train
