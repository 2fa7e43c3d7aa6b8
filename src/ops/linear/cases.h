#pragma once

#include "ops/check/check.h"

namespace tessera::ops::linear {

const check::OpTable& table();

}  // namespace tessera::ops::linear
