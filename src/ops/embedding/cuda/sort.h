#pragma once

#include "ops/embedding/cuda.h"

namespace tessera::ops::embedding::cuda {

struct Sorted {
  const int32_t *ids, *tokens;  // (T): ids in ascending order, and the tokens that have them, in theirs
};

// In the workspace's ids, tokens and counts.
Sorted sort_by_id(GpuStream, const Dims&, const int32_t* ids, const Workspace&);

}  // namespace tessera::ops::embedding::cuda
