// The processes of a job as threads of this one: for tests, and to try a layout without MPI. Memory of the host only.
#pragma once

#include <functional>

#include "dist/transport.h"

namespace tessera::dist {

struct InProcessOptions {
  int ranks_per_node = 0;        // 0: all on one node
  double deadline_seconds = 60;  // a peer that does not answer for so long is lost
};

// Calls `work` once in each of `processes` threads, each with OpenMP teams of one thread, and returns when all are
// done. Where one of them throws, the others are told, and the first exception is thrown here.
void run_in_process(int processes, const InProcessOptions&, const std::function<void(Transport&)>& work);

}  // namespace tessera::dist
