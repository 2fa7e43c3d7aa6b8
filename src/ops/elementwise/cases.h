#pragma once

#include "ops/check/check.h"

namespace tessera::ops::elementwise {

const check::OpTable& table();

}  // namespace tessera::ops::elementwise
