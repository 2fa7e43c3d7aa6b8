#pragma once

#include "ops/check/check.h"

namespace tessera::ops::glu {

const check::OpTable& table();

}  // namespace tessera::ops::glu
