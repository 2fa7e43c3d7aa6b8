// Memory of the GPU between processes, by NCCL. Two implementations, chosen by CMake: cuda/nccl.cu and nccl_none.cc.
#pragma once

#include <memory>

#include "dist/job.h"

namespace tessera::dist {

// Every process at the same time; chooses the GPU for this one, whose rank on its machine is given. `host`, which
// `world` speaks through, and the options must outlive it. UserError: no NCCL here, or not a GPU for each process.
//
// Its messages go in the order of the calls along gpu::stream(), whatever their channel: one thread makes them, in an
// order that both sides of every message share. exchange() returns before they have arrived; that a peer does not
// answer is then noticed by a thread beside, which ends the job.
std::unique_ptr<Transport> open_nccl(Transport& host, Communicator& world, const JobOptions&, int rank_on_machine);

}  // namespace tessera::dist
