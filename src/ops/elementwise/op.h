// Elementwise sums: the residual stream and the meeting points of gradients.
#pragma once

#include "core/context.h"

namespace tessera::ops::elementwise {

Costs costs(int64_t elements, DType);

void add(Context&, const View& a, const View& b, const View& y);  // y = a + b; y may be a or b; same shapes, contiguous
void add_to(Context&, const View& a, const View& y);              // y += a

}  // namespace tessera::ops::elementwise
