// Who does what when in a pipeline: a pure function of its shape.
//
// The model is cut into P V chunks; chunk c lies in process c mod P. With one chunk a process the order of work is
// 1F1B: a process runs ahead of the last one by as many micro-batches as there are processes behind it, then goes on by
// one forward and one backward pass in turn, so that it never holds more of them. With several chunks (interleaved
// 1F1B) micro-batches go through them in groups of P: less time is spent waiting, and more micro-batches are held.
//
//   idle share of a process = (P - 1) / (V M + P - 1)                                       M micro-batches
//
// Messages wait for both sides, so their order matters as much as that of the work: everyone follows one clock, on
// which every pass takes one tick. What a pass produces is sent in the tick in which it is wanted, and until then stays
// where it is. In each tick gradients travel first, then activations, then everyone works: one order for all, which no
// chain of waits can turn into a circle, and in which room is free before it is needed again.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/context.h"

namespace tessera::dist {

struct PipelineShape {
  int64_t processes = 1;      // P
  int64_t chunks = 1;         // V, of each process
  int64_t micro_batches = 1;  // M, of a step; with several chunks a multiple of P

  int64_t all_chunks() const { return processes * chunks; }
  int64_t process_of(int64_t chunk) const { return chunk % processes; }
  double idle_share() const;
};

// One pass of a micro-batch through a chunk.
struct Work {
  Pass pass;
  int64_t chunk, micro_batch;
  bool operator==(const Work&) const = default;
};

// All work of a process, in its order.
std::vector<Work> work_of(const PipelineShape&, int64_t process);

// What a process does in one tick. It receives what its work wants from other chunks, and sends what others want now.
struct Tick {
  int64_t time = 0;
  std::optional<Work> sends_gradients, sends_activations;  // of that work of its own
  std::optional<Work> work;
  int64_t slot = -1;  // of the work: micro-batches of a chunk that are held at the same time have slots of their own
};
struct PipelinePlan {
  std::vector<Tick> ticks;     // in which something is to do
  std::vector<int64_t> slots;  // of each of the process's chunks: most micro-batches held at a time
};
PipelinePlan plan_pipeline(const PipelineShape&, int64_t process);

}  // namespace tessera::dist
