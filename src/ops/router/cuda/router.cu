// Routing on the GPU: a warp a row. Scores lie in registers as integer keys in the order of the floats; the next of the
// k + 1 best is the warp's largest key and, among equals, its lowest index: two reductions of one instruction each,
// after a look at every register. A row is read once (4 E bytes) and its selection written (12 k bytes). At E 896 and
// k 16 that look is 17 x 160 instructions of a warp, some three times the time of the bytes, and still far below the
// experts' own products.
#include "ops/router/cuda/scores.h"

namespace tessera::ops::router::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr float kTiny = 1e-20f;  // keeps 0 / 0 out of the weights where every selected score is 0

struct Arguments {
  int64_t tokens;
  int experts, top_k, groups, top_groups;
  float scale;
  bool softmax, renormalised;
  const float* logits = nullptr;
  int64_t stride = 0;
  const float* bias = nullptr;
  int32_t* chosen = nullptr;  // (T, k), as weights and scores
  float *weights = nullptr, *scores = nullptr, *cutoff = nullptr;
  float* all_scores = nullptr;            // null where not wanted
  unsigned long long* invalid = nullptr;  // forward
  const float* dweights = nullptr;        // backward, from here on
  float* dlogits = nullptr;
};

__device__ void write_invalid(const Arguments& a, int64_t row, int lane) {
  for (int r = lane; r < a.top_k; r += 32) {
    a.chosen[row * a.top_k + r] = -1;
    a.weights[row * a.top_k + r] = 0;
    a.scores[row * a.top_k + r] = 0;
  }
  if (a.all_scores != nullptr) {
    for (int j = lane; j < a.experts; j += 32) a.all_scores[row * a.experts + j] = 0;
  }
  if (lane != 0) return;
  a.cutoff[row] = 0;
  atomicAdd(a.invalid, 1ull);
}

// c becomes -infinity outside the best groups; a group is judged by the sum of its two largest. `c`: all E of the row
// in shared memory, `judged`: a place a group.
__device__ void keep_best_groups(const Arguments& a, int lane, float* c, float* judged) {
  const int size = a.experts / a.groups;
  for (int g = lane; g < a.groups; g += 32) {
    float first = -INFINITY, second = -INFINITY;
    for (int j = g * size; j < (g + 1) * size; ++j) {
      second = fmaxf(second, fminf(first, c[j]));
      first = fmaxf(first, c[j]);
    }
    judged[g] = size > 1 ? first + second : first;
  }
  __syncwarp();
  for (int g = lane; g < a.groups; g += 32) {
    int before = 0;  // groups that come first, ties to the lower index
    for (int o = 0; o < a.groups; ++o) before += judged[o] > judged[g] || (judged[o] == judged[g] && o < g) ? 1 : 0;
    if (before < a.top_groups) continue;
    for (int j = g * size; j < (g + 1) * size; ++j) c[j] = -INFINITY;
  }
  __syncwarp();
}

// The largest key of the warp and the lowest index that has it; that key becomes 0.
template <int N>
__device__ int take_largest(uint32_t (&keys)[N], int lane, uint32_t& largest) {
  uint32_t best = 0;
  int at = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (keys[i] > best) best = keys[i], at = i;
  }
  largest = __reduce_max_sync(kAllLanes, best);
  const int index = int(__reduce_min_sync(kAllLanes, best == largest ? unsigned(lane + 32 * at) : ~0u));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (lane + 32 * i == index) keys[i] = 0;
  }
  return index;
}

template <int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments a) {
  extern __shared__ float shared[];  // (kWarps, E + G) with groups, else nothing
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  const int64_t row = int64_t(blockIdx.x) * kWarps + warp;
  if (row >= a.tokens) return;
  float z[N];
  load_row(a.logits + row * a.stride, a.experts, lane, z);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < N; ++i) finite = finite && isfinite(z[i]);
  if (!__all_sync(kAllLanes, finite)) return write_invalid(a, row, lane);
  const Scale scale = a.softmax ? softmax_scale(z, a.experts, lane) : Scale{};

  uint32_t keys[N];
  float* c = shared + warp * (a.experts + a.groups);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int j = lane + 32 * i;
    keys[i] = 0;
    if (j >= a.experts) continue;
    const float s = score_of(a.softmax, z[i], scale), biased = s + a.bias[j];
    keys[i] = key_of(biased);
    if (a.groups > 1) c[j] = biased;
    if (a.all_scores != nullptr) a.all_scores[row * a.experts + j] = s;
  }
  if (a.groups > 1) {
    __syncwarp();
    keep_best_groups(a, lane, c, c + a.experts);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (lane + 32 * i < a.experts) keys[i] = key_of(c[lane + 32 * i]);
    }
  }

  uint32_t key;
  for (int r = 0; r < a.top_k; ++r) {
    const int index = take_largest(keys, lane, key);
    if (r % 32 == lane) a.chosen[row * a.top_k + r] = index;
  }
  // The lane reads what it wrote itself. s from its logit again: c - b would cancel.
  float sum = 0;
  for (int r = lane; r < a.top_k; r += 32) {
    const float s = score_of(a.softmax, a.logits[row * a.stride + a.chosen[row * a.top_k + r]], scale);
    a.scores[row * a.top_k + r] = s;
    sum += s;
  }
  sum = warp_sum(sum);
  const float factor = a.renormalised ? a.scale / (sum + kTiny) : a.scale;
  for (int r = lane; r < a.top_k; r += 32) a.weights[row * a.top_k + r] = factor * a.scores[row * a.top_k + r];

  float next = -INFINITY;
  if (a.top_k < a.experts) {
    take_largest(keys, lane, key);
    next = of_key(key);
  }
  if (next == -INFINITY) {  // nothing is left: below every c
    float least = INFINITY;
    for (int j = lane; j < a.experts; j += 32) least = fminf(least, a.bias[j]);
    next = -warp_max(-least);
  }
  if (lane == 0) a.cutoff[row] = next;
}

__device__ float selected_gradient(const Arguments& a, float g, float s, float p, float pull, float sum) {
  if (a.softmax) return p * (g - pull / a.scale);
  if (a.renormalised) return (a.scale * g - pull) / (sum + kTiny) * s * (1 - s);
  return a.scale * g * s * (1 - s);
}

__global__ void __launch_bounds__(kThreads) backward_kernel(Arguments a) {
  const int lane = int(threadIdx.x % 32);
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, slots = row * a.top_k;
  if (row >= a.tokens) return;
  float* dz = a.dlogits + row * a.stride;
  const bool valid = a.chosen[slots] >= 0;
  float pull = 0, sum = 0;  // of g p and of s
  if (valid) {
    for (int r = lane; r < a.top_k; r += 32) {
      pull += a.dweights[slots + r] * a.weights[slots + r];
      sum += a.scores[slots + r];
    }
    pull = warp_sum(pull);
    sum = warp_sum(sum);
  }
  const bool everywhere = valid && a.all_scores != nullptr;
  for (int j = lane; j < a.experts; j += 32) dz[j] = everywhere ? -a.all_scores[row * a.experts + j] * pull : 0.0f;
  if (!valid) return;
  __syncwarp();  // the selected are written by other lanes
  for (int r = lane; r < a.top_k; r += 32) {
    const float g = a.dweights[slots + r], s = a.scores[slots + r];
    float& at = dz[a.chosen[slots + r]];
    at = everywhere ? at + a.scale * g * s : selected_gradient(a, g, s, a.weights[slots + r], pull, sum);
  }
}

Arguments arguments_of(const Dims& d, const Outputs& out) {
  Arguments a{.tokens = d.tokens,
              .experts = int(d.experts),
              .top_k = int(d.top_k),
              .groups = int(d.groups),
              .top_groups = int(d.top_groups),
              .scale = float(d.scale),
              .softmax = d.score == Score::softmax,
              .renormalised = renormalised(d)};
  a.chosen = out.experts.gpu<int32_t>();
  a.weights = out.weights.gpu<float>();
  a.scores = out.scores.gpu<float>();
  a.cutoff = out.cutoff.gpu<float>();
  a.all_scores = out.all_scores.present() ? out.all_scores.gpu<float>() : nullptr;
  return a;
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out) {
  Arguments a = arguments_of(d, out);
  a.logits = in.logits.gpu<float>(), a.stride = in.logits.row_stride();
  a.bias = in.bias.gpu<float>();
  a.invalid = reinterpret_cast<unsigned long long*>(out.invalid.gpu<int64_t>());
  const int64_t shared = d.groups > 1 ? kWarps * (d.experts + d.groups) * 4 : 0;
  choose_places(d.experts,
                [&]<int N>() { launch(forward_kernel<N>, ceil_div(d.tokens, kWarps), kThreads, shared, stream)(a); });
}

void backward(GpuStream stream, const Dims& d, const Outputs& out, const OutputGrads& dout, const Grads& grads) {
  Arguments a = arguments_of(d, out);
  if (!needs_all_scores(d)) a.all_scores = nullptr;  // may be there for other uses
  a.dweights = dout.weights.gpu<float>();
  a.dlogits = grads.logits.gpu<float>(), a.stride = grads.logits.row_stride();
  launch(backward_kernel, ceil_div(d.tokens, kWarps), kThreads, 0, stream)(a);
}

}  // namespace tessera::ops::router::cuda
