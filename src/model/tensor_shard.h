// One layer's products cut among the processes of the tensor axis, which all have the same tokens: the heads of KDA and
// MLA, and the hidden widths of dense and shared MLPs. Source: attention.md 1 and 9, whose heads meet only in the
// output projection.
//
// A mixer or an MLP works on its share as on a smaller layer: what comes out of its last product, and the gradient of
// what went in, are terms of sums over the axis. Each is summed once, so that everything outside, the residual stream,
// norms, routers, routed experts, embedding and head, is the same bits in every process. What all heads share inside
// (latents, their norms) each process computes whole, forward; its gradient stays a term until the end of the step.
#pragma once

#include "model/layer.h"

namespace tessera::model {

// UserError: a width that so many processes cannot share evenly. `where` names the run file, `file` the model's.
void check_tensor(const ModelConfig&, int64_t processes, const std::string& where, const std::string& file);
// What one process of so many computes: fewer heads.
ModelConfig share_of(ModelConfig, int64_t processes);

inline bool is_cut(const LayerContext& lc) { return lc.mesh != nullptr && !lc.mesh->tensor.alone(); }
// In place, the sum of everyone's term.
void sum_terms(const LayerContext&, const View& term);
// The same of what a layer puts out.
inline void sum_outputs(const LayerContext& lc, const View& y) {
  if (lc.output_wanted) sum_terms(lc, y);
}

}  // namespace tessera::model
