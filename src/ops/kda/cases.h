#pragma once

#include "ops/check/check.h"

namespace tessera::ops::kda {

const check::OpTable& table();

// One document of `tokens` tokens from state zero, `heads` heads of key and value width `dim`, C = 64, bounded gate:
// what `tessera bench kda` times.
check::SpeedCase speed_case(int64_t tokens, int64_t heads, int64_t dim);

}  // namespace tessera::ops::kda
