// KDA backward on the GPU, after `prepare` and a `scan` that leaves the state and R of every chunk:
//
//   reverse_scan     (pieces x H x value columns)  the gradient of the state, from the end; Y, dV
//   chunk_gradients  (chunks x H)                  dq, dk, dz, dbeta: no chunk waits for another
//
// and the sums over tokens, dA_log and ddt_bias, from one partial sum a chunk.
#pragma once

#include "ops/kda/cuda.h"

namespace tessera::ops::kda::cuda {

struct BackwardWorkspace {
  View states, r;  // ScanOutputs
  View d_states;   // (M, H, V, K) bf16: the gradient of the state each chunk ends with
  View y;          // (M, H, C, V) bf16: Y of attention.md 5
  View partials;   // (M, H, K + 1) f32: ddt_bias and dA_log of each chunk
};
int64_t backward_workspace_bytes(const Dims&, const Plan&);
BackwardWorkspace allocate_backward_workspace(Arena&, const Dims&, const Plan&);

// Writes d_states, y, dV and the gradient of the initial states.
void reverse_scan(GpuStream, const Dims&, const Documents&, const OutputGrads&, const Grads&, const Plan&,
                  const Workspace&, const BackwardWorkspace&);
// Writes dq, dk, dz, dbeta_logit and the partial sums.
void chunk_gradients(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Plan&,
                     const Workspace&, const BackwardWorkspace&);

void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Grads&, const Plan&, const Workspace&,
              const BackwardWorkspace&);

}  // namespace tessera::ops::kda::cuda
