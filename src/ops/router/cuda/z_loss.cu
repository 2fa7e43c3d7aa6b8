// Router z-loss on the GPU: a warp a row, whose logits lie in its registers as in routing.
//
// Forward reads a row once (4 E bytes) and writes its loss; backward reads logits and gradient and writes the gradient
// (12 E bytes), which is the floor. Lanes take neighbouring elements, so a warp's access is one line of 128 bytes. lse
// is max - log(1 / sum of exp(z - max)), the same sum as in the softmax beside it; sums over lanes in a fixed order.
#include "ops/router/cuda/scores.h"

namespace tessera::ops::router::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kWarps = 4, kThreads = 32 * kWarps;

struct Arguments {
  int64_t tokens;
  int experts;
  const float* logits = nullptr;
  int64_t stride = 0;
  float* loss = nullptr;  // forward
  float pull = 0;         // backward, from here on: twice the scale
  float* dlogits = nullptr;
  int64_t dstride = 0;
};

// The row's logits and their scale; false where one is not finite, in every lane alike.
template <int N>
__device__ bool read_row(const Arguments& a, int64_t row, int lane, float (&z)[N], Scale& scale) {
  load_row(a.logits + row * a.stride, a.experts, lane, z);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < N; ++i) finite = finite && isfinite(z[i]);
  if (!__all_sync(kAllLanes, finite)) return false;
  scale = softmax_scale(z, a.experts, lane);
  return true;
}

__device__ float log_sum_exp(Scale scale) { return scale.max - logf(scale.inverse_sum); }

template <int N>
__global__ void __launch_bounds__(kThreads) z_loss_forward(Arguments a) {
  const int lane = int(threadIdx.x % 32);
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.tokens) return;
  float z[N];
  Scale scale;
  const bool valid = read_row(a, row, lane, z, scale);
  const float lse = valid ? log_sum_exp(scale) : 0.0f;
  if (lane == 0) a.loss[row] = lse * lse;
}

template <int N>
__global__ void __launch_bounds__(kThreads) z_loss_backward(Arguments a) {
  const int lane = int(threadIdx.x % 32);
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.tokens) return;
  float z[N];
  Scale scale;
  if (!read_row(a, row, lane, z, scale)) return;
  const float pull = a.pull * log_sum_exp(scale);
  float* dz = a.dlogits + row * a.dstride;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int j = lane + 32 * i;
    if (j < a.experts) dz[j] += pull * score_of(true, z[i], scale);
  }
}

Arguments arguments_of(const z_loss::Dims& d, const z_loss::Inputs& in) {
  Arguments a{.tokens = d.tokens, .experts = int(d.experts)};
  a.logits = in.logits.gpu<float>(), a.stride = in.logits.row_stride();
  return a;
}

}  // namespace

void forward(GpuStream stream, const z_loss::Dims& d, const z_loss::Inputs& in, const z_loss::Outputs& out) {
  Arguments a = arguments_of(d, in);
  a.loss = out.loss.gpu<float>();
  choose_places(d.experts,
                [&]<int N>() { launch(z_loss_forward<N>, ceil_div(d.tokens, kWarps), kThreads, 0, stream)(a); });
}

void backward(GpuStream stream, const z_loss::Dims& d, const z_loss::Inputs& in, double scale,
              const z_loss::Grads& grads) {
  Arguments a = arguments_of(d, in);
  a.pull = float(2 * scale);
  a.dlogits = grads.logits.gpu<float>(), a.dstride = grads.logits.row_stride();
  choose_places(d.experts,
                [&]<int N>() { launch(z_loss_backward<N>, ceil_div(d.tokens, kWarps), kThreads, 0, stream)(a); });
}

}  // namespace tessera::ops::router::cuda
