#pragma once

#include "ops/check/check.h"

namespace tessera::ops::l2_norm {

const check::OpTable& table();

}  // namespace tessera::ops::l2_norm
