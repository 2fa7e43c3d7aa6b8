// The optimiser on the GPU against the one on the CPU, for `tessera selfcheck`: random parameters of many shapes, the
// same gradients, a few steps.
#pragma once

#include <vector>

#include "ops/check/check.h"

namespace tessera::optim {

// Where there is no GPU, gpu::require() says so.
std::vector<check::Result> check_cuda();

}  // namespace tessera::optim
