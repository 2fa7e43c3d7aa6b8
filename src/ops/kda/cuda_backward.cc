#include "ops/kda/cuda_backward.h"

namespace tessera::ops::kda::cuda {

BackwardWorkspace allocate_backward_workspace(Arena& arena, const Dims& d, const Plan& plan) {
  const int64_t m = plan.chunks, h = d.value_heads, k = d.key_dim, v = d.value_dim;
  const auto bf16s = [&](Shape shape) { return arena.allocate(DType::bf16, shape); };
  BackwardWorkspace b;
  b.states = bf16s({m, h, v, k});
  b.r = bf16s({m, h, kChunk, v});
  b.d_states = bf16s({m, h, v, k});
  b.y = bf16s({m, h, kChunk, v});
  b.partials = arena.allocate(DType::f32, {m, h, k + 1});
  return b;
}

int64_t backward_workspace_bytes(const Dims& d, const Plan& plan) {
  Arena dry = Arena::dry();
  allocate_backward_workspace(dry, d, plan);
  return dry.used();
}

}  // namespace tessera::ops::kda::cuda
