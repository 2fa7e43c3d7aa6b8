// Elementwise sums: the residual stream and the meeting points of gradients.
#pragma once

#include "core/context.h"

namespace tessera::ops::elementwise {

Costs costs(int64_t elements, DType);

// y = a + b, summed in float32 or wider and rounded once; y may be a or b. Same types and shapes, contiguous.
void add(Context&, const View& a, const View& b, const View& y);
void add_to(Context&, const View& a, const View& y);  // y += a

}  // namespace tessera::ops::elementwise
