#pragma once

#include "ops/check/check.h"

namespace tessera::ops::cross_entropy {

const check::OpTable& table();

}  // namespace tessera::ops::cross_entropy
