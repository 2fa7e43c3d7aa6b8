#pragma once

#include "ops/check/check.h"

namespace tessera::ops::embedding {

const check::OpTable& table();

}  // namespace tessera::ops::embedding
