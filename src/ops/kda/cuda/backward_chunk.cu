// What KDA's backward does within a chunk (attention.md 5), after the scans: dq, dk, dz, dbeta of 64 rows of one head.
//
//   dP = tril(dO R^T)   dA = -stril(Y R^T)   E = dO S0^T   Z = -Y S0^T   dKh = R dS1^T   bf16 operands, exact
//   xq, xr = dP, dA (k D)   xc = dA^T (beta k D)   xp = dP^T (q D)                       TF32: backward_products.cuh
//
// dG as on the CPU (cpu_backward.cc): with w = Kh o dKh, what the end of the chunk takes, and f = e^{G_L} o rowsum(S0 o
// dS1), what passes through it,
//
//   dg_t = sum_{u >= t} (q xq' + k (krow - xc - xp) - w)_u + sum_u w_u + f
//
// A block owns a chunk of a head and goes through the key channels 64 at a time (32 with the unbounded gate), so that
// two blocks fit a multiprocessor: 113 KB, 128 registers a thread. Warp w multiplies for row tile w / 2 and half w % 2
// of these channels; in the gates and sums over rows it has rows [8 w, 8 w + 8) and a lane one channel or two. Bytes:
// q, k, v, z, dO, R, Y and two states read, dq, dk, dz written, 224 KB at K = V = 128; the arithmetic takes less time.
#include "ops/kda/cuda/backward_products.cuh"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;
using namespace backward_chunk;

// Joins the products of each element: writes dq and dk, leaves the summand of dg in the place of lambda, the sums of
// Kh o dKh in `ends`, and adds to d_beta.
template <int D, Gate kGate>
__device__ void join(const Arguments& a, const Place& p, int first_channel, Shared<D, kGate>& s, const Lane& at,
                     const Accumulators<kGate, D>& acc) {
  constexpr int kN = kWarpTiles<D, kGate>, kWidth = kChannels<D, kGate>;
  constexpr float kShift = kGate == Gate::bounded ? kTileShift : 0.0f;
  auto& rows = s.of.rows;
  float ends[kN][2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * at.tile + at.g + 8 * h;
    const float beta = s.beta[row], dp_ii = s.dp_diagonal[row];
    uint32_t words[2][kN];  // dq, dk
    float d_beta = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int unit = at.half * kN + n, channel = 8 * unit + 2 * at.t, word = float_word<kWidth>(row, channel);
      const float2 k2 = floats_of_bf16s(word_of<kWidth / 8>(rows.k, row, unit, at.t));
      const float2 q2 = floats_of_bf16s(word_of<kWidth / 8>(rows.q, row, unit, at.t));
      const float2 lambda2 = pair_at(rows.lambda + word), tau2 = pair_at(s.tau[at.tile] + channel);
      const float2 later2 = pair_at(s.later[at.tile] + channel);
      float2 xq2, xr2, xc2;  // of pairs in the diagonal tile, where the products have none
      if constexpr (kGate == Gate::unbounded) {
        xq2 = pair_at(rows.pairs[0] + word), xr2 = pair_at(rows.pairs[1] + word), xc2 = pair_at(rows.pairs[2] + word);
      }
      float dq[2], dk[2], summand[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const auto of = [&](const float2& pair) { return c == 0 ? pair.x : pair.y; };
        const float k = of(k2), q = a.scale * of(q2), lambda = of(lambda2), tau = of(tau2);
        const float to_row = exp2_fast(lambda - kShift);
        const float from_column = exp2_fast((kGate == Gate::bounded ? kShift : tau) - lambda);
        const float e = acc.e[n][2 * h + c], z = acc.z[n][2 * h + c], w = acc.w[n][2 * h + c];
        float by_q = to_row * e, by_k = to_row * z, column = from_column * w;
        // With the rounded factors of the products, so that what rows take is what columns give.
        summand[c] = rounded(q * to_row) * e + rounded(k * (beta * to_row)) * z - rounded(k * from_column) * w;
        if constexpr (kGate == Gate::unbounded) {
          summand[c] += q * of(xq2) + k * (beta * of(xr2) - of(xc2));
          by_q += of(xq2);
          by_k += of(xr2);
          column += of(xc2);
        }
        const float by_end = exp2_fast(tau - lambda + of(later2)) * acc.d_end[n][2 * h + c];
        d_beta += k * by_k;
        ends[n][c] += k * by_end;
        summand[c] -= k * by_end;
        dq[c] = a.scale * (by_q + dp_ii * k);
        dk[c] = beta * by_k + column + by_end + dp_ii * q;
      }
      *reinterpret_cast<float2*>(rows.lambda + word) = make_float2(summand[0], summand[1]);
      words[0][n] = pack_bf16s(dq[0], dq[1]);
      words[1][n] = pack_bf16s(dk[0], dk[1]);
    }
    d_beta += __shfl_xor_sync(kAllLanes, d_beta, 1);
    d_beta += __shfl_xor_sync(kAllLanes, d_beta, 2);
    if (at.t == 0) s.d_beta[at.half][row] += d_beta;
    const int64_t to = p.row_offset(a, row, D) + first_channel + 8 * kN * at.half;
    store_pieces(a.dq + to, a.dk + to, row < p.rows, at, words);
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float sum = sum_over_rows(ends[n][c]);
      if (at.g == 0) s.ends[at.tile][8 * (at.half * kN + n) + 2 * at.t + c] = sum;
    }
  }
}

// dg, dz, and this chunk's sums for ddt_bias; returns this thread's share of dA_log.
template <int D, Gate kGate>
__device__ float gate_gradients(const Arguments& a, const Place& p, int first_channel, Shared<D, kGate>& s,
                                const Lane& at) {
  constexpr int kC = kLaneChannels<D, kGate>, kWidth = kChannels<D, kGate>;
  const int channel = kC * at.lane, first_row = 8 * at.warp;
  const HeadGate<D, kGate> gate(a, p, first_channel, at);
  RawRows<D, kGate> z;
  z.load(a, p, first_channel, at);
  float sums[8][kC], all[kC] = {};  // from a row to the end of the warp's; what does not depend on the row
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    float sum = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      sum += s.of.rows.lambda[float_word<kWidth>(first_row + i, channel + c)];
      sums[i][c] = sum;
    }
    s.groups[at.warp][channel + c] = sum;
    for (int i = 0; i < kTiles; ++i) all[c] += s.ends[i][channel + c];
    float dot = 0;
    for (int w = 0; w < kWarps; ++w) dot += s.flow[w][channel + c];
    all[c] += exp2_fast(s.tau[0][channel + c] + s.later[0][channel + c]) * dot;
  }
  __syncthreads();
  float sum_x[kC] = {}, sum_a_log = 0;
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    float later = 0;
    for (int w = kWarps - 1; w > at.warp; --w) later += s.groups[w][channel + c];
    all[c] += later;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first_row + i >= p.rows) continue;
    float x[kC], dz[kC];
    z.get(i, x);
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      const GateSlopes slopes = gate_slopes<kGate>(x[c] + gate.bias[c], gate.rate, a.lower_bound);
      const float dg = sums[i][c] + all[c];
      dz[c] = slopes.by_x * dg;
      sum_x[c] += dz[c];
      sum_a_log += slopes.by_a_log * dg;
    }
    store_channels(a.dz + p.row_offset(a, first_row + i, D) + first_channel + channel, dz);
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) s.flow[at.warp][channel + c] = sum_x[c];
  __syncthreads();
  if (at.thread < kWidth) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += s.flow[w][at.thread];
    a.partials[p.index() * (D + 1) + first_channel + at.thread] = sum;
  }
  return sum_a_log;
}

template <int D, Gate kGate>
__global__ void __launch_bounds__(kThreads, 2) chunk_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 memory[];
  Shared<D, kGate>& s = *reinterpret_cast<Shared<D, kGate>*>(memory);
  const Place p(a);
  ask_for_passes<D, kGate>(a, p, Lane());
  fetch_rows<D>(a, p, s);
  fetch_states<D, kGate>(a, p, 0, s, Lane());
  if (threadIdx.x < kChunk) s.beta[threadIdx.x] = a.beta[p.index() * kChunk + threadIdx.x];
  wait_copies<1>();
  __syncthreads();
  score_gradients(s, Lane());
  value_dots(a, p, s);
  float d_a_log = 0;
#pragma unroll 1
  for (int first_channel = 0; first_channel < D; first_channel += kChannels<D, kGate>) {
    if (first_channel > 0) fetch_states<D, kGate>(a, p, first_channel, s, Lane());
    RawRows<D, kGate> z;
    z.load(a, p, first_channel, Lane());
    Accumulators<kGate, D> acc = {};
    wait_copies<0>();
    __syncthreads();
    state_products(s, Lane(), acc);
    state_dots(s, Lane());
    __syncthreads();
    fetch_keys(a, p, first_channel, s, Lane());
    sum_gates(a, p, first_channel, z, s, Lane());
    wait_copies<0>();
    __syncthreads();
    if constexpr (kGate == Gate::unbounded) diagonal_pairs(s, Lane(), a.scale);
    sum_later_tiles(s, Lane());
    column_products(s, Lane(), a.scale, acc.w);
    row_products(s, Lane(), acc.e, acc.z);
    __syncthreads();
    join(a, p, first_channel, s, Lane(), acc);
    __syncthreads();
    d_a_log += gate_gradients(a, p, first_channel, s, Lane());
    __syncthreads();
  }
  d_a_log = block_sum(d_a_log, s.flow[0]);
  if (threadIdx.x == 0) a.partials[p.index() * (D + 1) + D] = d_a_log;
  if (threadIdx.x < p.rows) {
    const int64_t i = p.row_offset(a, int(threadIdx.x), 1);
    const float d_beta = s.d_beta[0][threadIdx.x] + s.d_beta[1][threadIdx.x];
    const float rest = beta_of(-to_float(a.beta_logit[i]), 1);
    a.d_beta_logit[i] = from_float<bf16>(d_beta * s.beta[threadIdx.x] * rest);
  }
}

template <int D, Gate kGate>
void launch_chunks(GpuStream stream, int64_t chunks, const Arguments& a) {
  launch(chunk_kernel<D, kGate>, chunks * a.heads, kThreads, sizeof(Shared<D, kGate>), stream)(a);
}

}  // namespace

void chunk_gradients(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
                     const Plan& plan, const Workspace& w, const BackwardWorkspace& b) {
  const Arguments a{.heads = d.value_heads,
                    .scale = query_scale(d),
                    .lower_bound = float(d.lower_bound),
                    .chunks = reinterpret_cast<const Chunk*>(w.chunks.gpu<int64_t>()),
                    .q = in.q.gpu<bf16>(),
                    .k = in.k.gpu<bf16>(),
                    .v = in.v.gpu<bf16>(),
                    .z = in.z.gpu<bf16>(),
                    .beta_logit = in.beta_logit.gpu<bf16>(),
                    .d_o = dout.o.gpu<bf16>(),
                    .a_log = in.a_log.present() ? in.a_log.gpu<float>() : nullptr,
                    .dt_bias = in.dt_bias.gpu<float>(),
                    .beta = w.beta.gpu<float>(),
                    .states = b.states.gpu<bf16>(),
                    .r = b.r.gpu<bf16>(),
                    .d_states = b.d_states.gpu<bf16>(),
                    .y = b.y.gpu<bf16>(),
                    .dq = grads.q.gpu<bf16>(),
                    .dk = grads.k.gpu<bf16>(),
                    .dz = grads.z.gpu<bf16>(),
                    .d_beta_logit = grads.beta_logit.gpu<bf16>(),
                    .partials = b.partials.gpu<float>()};
  const auto with_gate = [&](auto dim) {
    constexpr int D = decltype(dim)::value;
    if (d.gate == Gate::bounded) return launch_chunks<D, Gate::bounded>(stream, plan.chunks, a);
    launch_chunks<D, Gate::unbounded>(stream, plan.chunks, a);
  };
  if (d.key_dim == 32) return with_gate(std::integral_constant<int, 32>());
  if (d.key_dim == 64) return with_gate(std::integral_constant<int, 64>());
  with_gate(std::integral_constant<int, 128>());
}

}  // namespace tessera::ops::kda::cuda
