#pragma once

#include "ops/check/check.h"

namespace tessera::ops::sigmoid_gate {

const check::OpTable& table();

}  // namespace tessera::ops::sigmoid_gate
