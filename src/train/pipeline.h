// The micro-batches of a step through the processes of a pipeline, by the schedule of dist/pipeline_schedule.h.
//
// A micro-batch leaves its streams and saved tensors in a slot until its gradient has gone on: micro-batches end in
// another order than they lie on a stack. Each slot is as large as the largest micro-batch of the step needs, found by
// running them dry, and there are as many as the schedule holds at a time. What one pass alone needs (workspaces,
// recomputed tensors, gradients inside the chunk) lies above them, once.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dist/pipeline_schedule.h"
#include "model/model.h"

namespace tessera::train {

struct MicroBatch {  // on the host; null on dry
  const int32_t* ids = nullptr;
  const int32_t* targets = nullptr;
  std::span<const int64_t> offsets;  // of its documents; must outlive it
};

class Pipeline {
 public:
  explicit Pipeline(const model::Model& model);  // of several chunks, in several processes

  struct Step {
    const model::Weights& weights;
    model::StepRecord& record;
    std::span<const MicroBatch> batches;
    double scale = 0;   // of the losses' sum
    View losses;        // room for those of one micro-batch, f32
    int64_t count = 0;  // of the step's micro-batches; on dry these may be examples of them
  };
  // Adds the gradients of all of them. The sum of their losses in the process of the last chunk, 0 in others.
  double run(Context&, const Step&) const;

 private:
  class Run;
  std::vector<int64_t> slot_bytes(const Context&, const Step&) const;

  const model::Model& model_;
  dist::Communicator& axis_;
  dist::DryMesh dry_mesh_;
  model::Model twin_;  // for dry runs beside real ones
};

}  // namespace tessera::train
