#pragma once

#include "ops/check/check.h"

namespace tessera::ops::mla {

const check::OpTable& table();
std::vector<check::Result> more_checks();  // packed = separate, absorbed = expanded, causality, extremes

}  // namespace tessera::ops::mla
