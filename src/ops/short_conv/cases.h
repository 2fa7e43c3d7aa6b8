#pragma once

#include "ops/check/check.h"

namespace tessera::ops::short_conv {

const check::OpTable& table();

}  // namespace tessera::ops::short_conv
