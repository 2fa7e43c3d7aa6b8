#pragma once

#include "ops/check/check.h"

namespace tessera::ops::attn_res {

const check::OpTable& table();

}  // namespace tessera::ops::attn_res
