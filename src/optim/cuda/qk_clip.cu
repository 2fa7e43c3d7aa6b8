// QK-Clip on the GPU: the factors of every head by one block of threads, then a block a row of the projections. Rows
// of heads that stay below the threshold, nearly all of them, are not read.
#include "optim/cuda/pieces.h"

namespace tessera::optim::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    factors_kernel(const float* max_logit, int64_t heads, double threshold, float* factors, int32_t* outcome) {
  int bad = 0;
  for (int64_t h = threadIdx.x; h < heads; h += kThreads) bad |= !(max_logit[h] < __int_as_float(0x7f800000));
  bad = __syncthreads_or(bad);
  for (int64_t h = threadIdx.x; h < heads; h += kThreads) {
    const float largest = max_logit[h];
    const bool clipped = !bad && double(largest) > threshold;
    const double gamma = clipped ? threshold / double(largest) : 1;
    factors[2 * h] = static_cast<float>(sqrt(gamma));
    factors[2 * h + 1] = static_cast<float>(gamma);
    outcome[h] = largest < __int_as_float(0x7f800000) ? clipped : -1;
  }
}

// Rows of a projection: of each head `scaled` rows, the first `nope` by the first factor, and `all - scaled` that stay.
struct Rows {
  float* value;
  bf16* copy;
  int64_t stride, copy_stride, width;
  int64_t nope, scaled, all;
};

__global__ void __launch_bounds__(kThreads) scale_kernel(Rows r, const float* factors) {
  const int64_t head = blockIdx.x / r.scaled, in_head = blockIdx.x % r.scaled;
  const float factor = factors[2 * head + (in_head < r.nope ? 0 : 1)];
  if (factor == 1) return;
  const int64_t row = head * r.all + in_head;
  for (int64_t i = threadIdx.x; i < r.width; i += kThreads) {
    const float scaled = r.value[row * r.stride + i] * factor;
    r.value[row * r.stride + i] = scaled;
    if (r.copy != nullptr) r.copy[row * r.copy_stride + i] = __float2bfloat16_rn(scaled);
  }
}

void scale_rows(GpuStream stream, int64_t heads, const View& value, const View& copy, int64_t nope, int64_t scaled,
                int64_t all, const float* factors) {
  const Rows rows{.value = value.gpu<float>(),
                  .copy = copy.present() ? copy.gpu<bf16>() : nullptr,
                  .stride = value.row_stride(),
                  .copy_stride = copy.row_stride(),
                  .width = value.dim(1),
                  .nope = nope,
                  .scaled = scaled,
                  .all = all};
  launch(scale_kernel, heads * scaled, kThreads, 0, stream)(rows, factors);
}

}  // namespace

void qk_clip(GpuStream stream, const QkClip& d, const QkClipLayer& layer, const View& factors, const View& outcome) {
  float* of_heads = factors.gpu<float>();
  launch(factors_kernel, 1, kThreads, 0, stream)(layer.max_logit.gpu<float>(), d.heads, d.threshold, of_heads,
                                                 outcome.gpu<int32_t>());
  const int64_t query = d.nope_dim + d.rope_dim;
  scale_rows(stream, d.heads, layer.q_proj, layer.q_copy, d.nope_dim, query, query, of_heads);
  scale_rows(stream, d.heads, layer.kv_b, layer.kv_copy, d.nope_dim, d.nope_dim, d.nope_dim + d.value_dim, of_heads);
}

}  // namespace tessera::optim::cuda
