#pragma once

#include "ops/kda/op.h"
#include "ops/kda/walk.h"

namespace tessera::ops::kda::cpu {

// Workspace, in elements. `scratch` is (threads, elements of a thread), `parts` (part_count() + 1, 2) of i64,
// `partials` (part_count(), HV, partial_width()).
int64_t forward_scratch(const Dims&, DType);                     // a thread
int64_t backward_scratch(const Dims&, DType);                    // a thread
int64_t step_scratch(const Dims&);                               // a thread
int64_t map_scratch(const Dims&, Pass, bool transition, DType);  // a thread
int64_t partial_width(const Dims&);

void forward(const Dims&, const Inputs&, const Outputs&, Saved*, const View& scratch, const View& parts);
void backward(const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&, const View& scratch,
              const View& partials, const View& parts);
void step(const Dims&, const Inputs&, const View& state, const View& o, const View& scratch);
void state_map(const Dims&, const Inputs&, int64_t document, const StateMap&, const View& scratch);
void state_gradient_map(const Dims&, const Inputs&, const Saved&, const View& d_o, int64_t document, const View& offset,
                        const View& scratch);
void fold(const StateMap&, Pass, const View& state, const View& row);  // row (threads, K)

}  // namespace tessera::ops::kda::cpu
