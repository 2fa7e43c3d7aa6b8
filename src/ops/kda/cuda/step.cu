// KDA decode on the GPU: the token recurrence of attention.md 3.1, every sequence's state read and written once, in
// place: 8 K V bytes a head and sequence, bound by memory.
//
// A row of the V-first state is one value channel; it lies in one warp, and a block has 32 rows, 4 a warp, all loaded
// before the first is used. With Sbar = diag(e^g) S, both products come from one pass over a row:
//
//   r = beta (v - Sbar^T k)       o = scale (Sbar^T q + r (k . q))
#include "ops/kda/cuda.h"
#include "ops/kda/cuda/gate.cuh"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;
using tessera::cuda::bf16;

constexpr int kWarps = 8, kRowsOfWarp = 4, kRows = kWarps * kRowsOfWarp, kThreads = 32 * kWarps;

struct Arguments {
  int heads;
  float scale, lower_bound, beta_bound;
  const bf16 *q, *k, *v, *z, *beta_logit;
  const float *a_log, *dt_bias;
  float* state;
  bf16* o;
};

template <int N>
struct alignas(4 * N) Floats {
  float x[N];
};

template <int D, Gate kGate>
__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ Arguments a) {
  constexpr int kOwn = D / 32;  // channels of a lane
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t item = blockIdx.x / (D / kRows);  // (sequence, head)
  const int head = static_cast<int>(item % a.heads);
  const int row = static_cast<int>(blockIdx.x % (D / kRows)) * kRows + kRowsOfWarp * warp, channel = kOwn * lane;
  Floats<kOwn>* state = reinterpret_cast<Floats<kOwn>*>(a.state + (item * D + row) * D) + lane;
  Floats<kOwn> s[kRowsOfWarp];
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) s[i] = state[i * (D / kOwn)];

  const float rate = gate_rate(a.a_log, head), beta = beta_of(to_float(a.beta_logit[item]), a.beta_bound);
  float alpha[kOwn], k[kOwn], q[kOwn], kq = 0;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const int64_t at = item * D + channel + c;
    alpha[c] = exp2_fast(log2_gate<kGate>(to_float(a.z[at]) + a.dt_bias[head * D + channel + c], rate, a.lower_bound));
    k[c] = to_float(a.k[at]);
    q[c] = to_float(a.q[at]);
    kq += k[c] * q[c];
  }
  kq = warp_sum(kq);
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    float by_k = 0, by_q = 0;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      s[i].x[c] *= alpha[c];
      by_k += s[i].x[c] * k[c];
      by_q += s[i].x[c] * q[c];
    }
    by_k = warp_sum(by_k);
    by_q = warp_sum(by_q);
    const float r = beta * (to_float(a.v[item * D + row + i]) - by_k);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) s[i].x[c] += r * k[c];
    state[i * (D / kOwn)] = s[i];
    if (lane == i) a.o[item * D + row + i] = from_float<bf16>(a.scale * (by_q + r * kq));
  }
}

template <int D>
void launch_step(GpuStream stream, const Dims& d, const Arguments& a) {
  const int64_t blocks = d.tokens * d.heads * (D / kRows);
  if (d.gate == Gate::bounded) {
    launch(step_kernel<D, Gate::bounded>, blocks, kThreads, 0, stream)(a);
  } else {
    launch(step_kernel<D, Gate::unbounded>, blocks, kThreads, 0, stream)(a);
  }
}

}  // namespace

void step(GpuStream stream, const Dims& d, const Inputs& in, const View& state, const View& o) {
  const Arguments a{.heads = static_cast<int>(d.heads),
                    .scale = query_scale(d),
                    .lower_bound = static_cast<float>(d.lower_bound),
                    .beta_bound = d.negative_eigenvalues ? 2.0f : 1.0f,
                    .q = in.q.gpu<bf16>(),
                    .k = in.k.gpu<bf16>(),
                    .v = in.v.gpu<bf16>(),
                    .z = in.z.gpu<bf16>(),
                    .beta_logit = in.beta_logit.gpu<bf16>(),
                    .a_log = in.a_log.present() ? in.a_log.gpu<float>() : nullptr,
                    .dt_bias = in.dt_bias.gpu<float>(),
                    .state = state.gpu<float>(),
                    .o = o.gpu<bf16>()};
  if (d.key_dim == 32) return launch_step<32>(stream, d, a);
  if (d.key_dim == 64) return launch_step<64>(stream, d, a);
  launch_step<128>(stream, d, a);
}

}  // namespace tessera::ops::kda::cuda
