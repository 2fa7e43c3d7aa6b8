// What the processes of a step must know together before any of them judges it: counts of the routers and the largest
// logits, over everyone who saw other tokens. Integer sums, so that no sharding changes a bias (moe.md 2.2).
#pragma once

#include "dist/mesh.h"
#include "model/model.h"

namespace tessera::train {

// Counters become their sums along the replica axis, max_logit the maximum. Histograms hold the counts of earlier steps
// where a layer has yet to see enough tokens: those must lie on the first process of the axis alone.
void sum_record(dist::Communicator& replica, const model::StepRecord&);
// After a step that did not move the bias: what stays goes on on the first process of the axis.
void keep_histogram_once(const dist::Communicator& replica, const ops::router::Counters&);

}  // namespace tessera::train
