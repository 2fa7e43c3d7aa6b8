// Elementwise sums: the residual stream, the meeting points of gradients, and sums of squares.
#pragma once

#include "core/context.h"

namespace tessera::ops::elementwise {

Costs costs(int64_t elements, DType);

// y = a + b, summed in float32 or wider and rounded once; y may be a or b. Same types and shapes, contiguous.
void add(Context&, const View& a, const View& b, const View& y);
void add_to(Context&, const View& a, const View& y);  // y += a

// sums (B) f64: of the squares of each of the B equal parts of x, f32; one order of sums on every run.
void square_sums(Context&, const View& x, const View& sums);

}  // namespace tessera::ops::elementwise
