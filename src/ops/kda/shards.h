// A pack cut over ranks, all of which are played by one device: what context parallelism asks of the op (op.h:
// StateMap). A document that crosses a cut goes on in the next rank; an empty one at a cut belongs to the rank behind.
#pragma once

#include "ops/kda/problem.h"

namespace tessera::ops::kda {

// Every rank's ops in the place of run_views. `cuts`: 0, the first token of each further rank, T. Without initial
// states only the states of documents that cross a cut exist, as in training; r.outputs has no final_state then.
void run_sharded(const Problem&, const std::vector<int64_t>& cuts, const check::Run&);

check::Case make_sharded_case(const Problem&, const std::vector<int64_t>& cuts);

}  // namespace tessera::ops::kda
