#pragma once

#include "ops/check/check.h"

namespace tessera::ops::rms_norm {

const check::OpTable& table();

}  // namespace tessera::ops::rms_norm
