// KDA's backward on the GPU from its steps, and the sums over tokens for the gradients of the gate's parameters.
#include "core/cuda/kernel.h"
#include "ops/kda/cuda_backward.h"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;

// Chunks of a first-level sum. Groups are counted from the first chunk and both levels add in order: what is appended
// without a gradient changes no bit.
constexpr int64_t kGroup = 64;

// partials (M, H, W): the first chunk of each group becomes the group's sum.
__global__ void sum_groups(float* partials, int64_t chunks, int64_t heads, int64_t width) {
  const int64_t head = blockIdx.x % heads, first = blockIdx.x / heads * kGroup;
  if (threadIdx.x >= width) return;
  float* to = partials + (first * heads + head) * width + threadIdx.x;
  const int64_t count = chunks - first < kGroup ? chunks - first : kGroup;
  float sum = 0;
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) sum += to[i * heads * width];
  *to = sum;
}
__global__ void add_groups(const float* partials, int64_t groups, int64_t heads, int64_t width, float* d_dt_bias,
                           float* d_a_log) {
  const int64_t head = blockIdx.x;
  if (threadIdx.x >= width) return;
  const float* from = partials + head * width + threadIdx.x;
  float sum = 0;
#pragma unroll 8
  for (int64_t i = 0; i < groups; ++i) sum += from[i * kGroup * heads * width];
  if (threadIdx.x < width - 1) {
    d_dt_bias[head * (width - 1) + threadIdx.x] += sum;
  } else if (d_a_log != nullptr) {
    d_a_log[head] += sum;
  }
}

}  // namespace

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
              const Plan& plan, const Workspace& w, const BackwardWorkspace& b) {
  prepare(stream, d, in, plan, w);
  ScanOutputs kept;
  kept.states = b.states;
  kept.r = b.r;
  scan(stream, d, in, plan, w, kept);
  reverse_scan(stream, d, in.documents, dout, grads, plan, w, b);
  chunk_gradients(stream, d, in, dout, grads, plan, w, b);
  const int64_t width = d.key_dim + 1, groups = ceil_div(plan.chunks, kGroup), heads = d.value_heads;
  const int threads = int(ceil_div(width, 32)) * 32;
  float *partials = b.partials.gpu<float>(), *d_a_log = grads.a_log.present() ? grads.a_log.gpu<float>() : nullptr;
  launch(sum_groups, groups * heads, threads, 0, stream)(partials, plan.chunks, heads, width);
  launch(add_groups, heads, threads, 0, stream)(partials, groups, heads, width, grads.dt_bias.gpu<float>(), d_a_log);
}

}  // namespace tessera::ops::kda::cuda
