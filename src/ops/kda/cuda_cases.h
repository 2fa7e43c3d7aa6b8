#pragma once

#include "ops/check/check.h"

namespace tessera::ops::kda {

// What only a GPU runs: the widths its kernels have, pieces of long documents, decode, and equality of bits.
std::vector<check::Case> cuda_cases();

}  // namespace tessera::ops::kda
