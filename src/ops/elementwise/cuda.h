#pragma once

#include "core/context.h"

namespace tessera::ops::elementwise::cuda {

void add(GpuStream, const View& a, const View& b, const View& y);

}  // namespace tessera::ops::elementwise::cuda
