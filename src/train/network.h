// How long a step takes on a layout, before it runs: products at a rate, and exchanges by latency and bandwidth.
//
//   m messages of V bytes together, B bytes/s of line rate, efficiency eta:   m (alpha + V_half / (eta B)) + V / (eta
//   B)
//
// which is V / B(V) with the roll-off B(V) = eta B v / (v + V_half) of messages of v = V / m bytes (infrastructure.md
// 3.1). Links inside a node and across nodes work at the same time. Nothing hides behind anything else: that is how the
// program runs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/traffic.h"

namespace tessera::train {

struct Link {
  double alpha_seconds;  // of a message
  double bytes_per_s;    // line rate of one process, each way
  double half_bytes;     // V_half: a message of this length reaches half of the rate
};

struct Target {
  std::string name;
  double flops_per_s;  // of one process, in whole training steps: everything that is not a product is in it
  int64_t usable_bytes;
  int64_t processes_per_node;
  Link inside, across;
};

// A process a GPU, eight a node. Empty: no such GPU; names_of_gpus() are those there are.
std::optional<Target> gpu_target(const std::string& name);
std::vector<std::string> names_of_gpus();
// Processes that share the cores and the memory of this machine.
Target cpu_target(int64_t processes);

double seconds_of(const Flow&, const Target&);

}  // namespace tessera::train
