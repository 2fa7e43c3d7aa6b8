#pragma once

#include "core/context.h"

namespace tessera::ops::elementwise::cuda {

void add(GpuStream, const View& a, const View& b, const View& y);
void square_sums(GpuStream, const View& x, const View& sums);

}  // namespace tessera::ops::elementwise::cuda
