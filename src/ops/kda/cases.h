#pragma once

#include "ops/check/check.h"

namespace tessera::ops::kda {

const check::OpTable& table();

// One document of `tokens` tokens, `heads` heads of key and value width `dim`: what `tessera bench kda` times.
check::SpeedCase speed_case(int64_t tokens, int64_t heads, int64_t dim);

}  // namespace tessera::ops::kda
