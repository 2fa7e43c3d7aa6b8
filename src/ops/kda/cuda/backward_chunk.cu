// What KDA's backward does within a chunk (attention.md 5), after the scans: dq, dk, dz, dbeta of 64 rows of one head.
//
//   dP = tril(dO R^T)    dA = -stril(Y R^T)    E = dO S0^T    Z = -Y S0^T    dKh = R dS1^T        operands are bf16
//   xq = dP (k D)        xr = dA (k D)         xc = dA^T (beta k D)          xp = dP^T (q D)      TF32
//
// Decays. D_ij = e^{G_i - G_j} is carried from tile to tile of 16 rows like the state from chunk to chunk: lambda is
// the sum of gates from the start of a row's tile, inclusive, tau that of the whole tile (both in base 2), and
//
//   rows i in tile I      X = E;    for J < I:  X <- 2^tau_J X + dP_IJ (k 2^(tau_J - lambda));   xq + e^G E = 2^lambda
//   X columns j in tile J   W = 0;    for I > J, from the last:  W <- 2^tau_I W + dP_IJ^T (q 2^lambda) + ...;
//                         xc + xp = 2^(tau_J - lambda) W
//
// All exponents are <= 0, and a factor depends on no row after those it is used for. The diagonal tile is one more step
// of both where the gate is bounded: with 2^(shift - lambda) and 2^(lambda - shift), shift = -58, no factor passes
// 2^58 (16 gates of -5). Where it is not, 256 threads go through its pairs, D a running product. The diagonal of P,
// which no gate acts on, is left out of both and added at the end: in dG it would cancel against itself.
//
// dG as on the CPU (cpu_backward.cc): with w = Kh o dKh, what the chunk's end takes, and f = e^{G_L} o rowsum(S0 o
// dS1),
//   dg_t = sum_{u >= t} (q xq' + k (krow - xc - xp) - w)_u + sum_u w_u + f
//
// A block owns a chunk of a head and goes through the key channels 64 at a time (32 with the unbounded gate), so that
// two blocks fit a multiprocessor: 113 KB, 128 registers a thread. Warp w multiplies for row tile w / 2 and half w % 2
// of these channels; in the gates and sums over rows it has rows [8 w, 8 w + 8) and a lane one channel or two. Bytes:
// q, k, v, z, dO, R, Y and 2 states read, dq, dk, dz written, 224 KB at K = V = 128; arithmetic takes less time.
#include "ops/kda/cuda/backward_chunk.cuh"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;
using namespace backward_chunk;

// dP and dA in tiles: dP by the even warps, dA by the odd.
template <int D, Gate kGate>
__device__ void score_gradients(Shared<D, kGate>& s, const Lane& at) {
  const uint32_t left = shared_address(at.half == 0 ? s.d_o : s.y), right = shared_address(s.r);
  float acc[kTiles][2][4] = {};
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4];
    load_matrices(unit_address<D / 8>(left, 16 * at.tile + at.lane % 16, 2 * k + at.lane / 16), a);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j > at.tile) continue;
      uint32_t b[4];
      load_matrices(unit_address<D / 8>(right, 16 * j + at.lane % 16, 2 * k + at.lane / 16), b);
      mma_bf16(acc[j][0], a, b[0], b[2]);
      mma_bf16(acc[j][1], a, b[1], b[3]);
    }
  }
  const float sign = at.half == 0 ? 1.0f : -1.0f;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (j > at.tile) continue;
    float* out = (at.half == 0 ? s.dp : s.da) + tile_start(at.tile, j);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = at.g + 8 * h, column = 8 * n + 2 * at.t;
        float2 x = make_float2(sign * acc[j][n][2 * h], sign * acc[j][n][2 * h + 1]);
        if (j == at.tile) {
          if (at.half == 0 && column == row) s.dp_diagonal[16 * at.tile + row] = x.x;
          if (at.half == 0 && column + 1 == row) s.dp_diagonal[16 * at.tile + row] = x.y;
          x = make_float2(column < row ? x.x : 0.0f, column + 1 < row ? x.y : 0.0f);
        }
        if (j < at.tile || kGate == Gate::bounded) {
          x = make_float2(rounded(x.x), rounded(x.y));
        }
        *reinterpret_cast<float2*>(out + tile_word(row, column)) = x;
      }
    }
  }
}

// The part of dbeta that comes from V: rowsum(Y o V), four threads a row.
template <int D, Gate kGate>
__device__ void value_dots(const Arguments& a, const Place& p, Shared<D, kGate>& s) {
  const int row = threadIdx.x / 4, part = threadIdx.x % 4;
  float dot = 0;
  if (row < p.rows) {
    const bf16* v = a.v + p.row_offset(a, row, D);
    const bf16* y = reinterpret_cast<const bf16*>(s.y);
#pragma unroll
    for (int unit = part; unit < D / 8; unit += 4) {
      float v8[8], y8[8];
      load8(v + 8 * unit, v8);
      load8(y + 8 * swizzled<D / 8>(row, unit), y8);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += v8[i] * y8[i];
    }
  }
  dot += __shfl_xor_sync(kAllLanes, dot, 1);
  dot += __shfl_xor_sync(kAllLanes, dot, 2);
  if (part == 0) {
    s.d_beta[0][row] = dot;
    s.d_beta[1][row] = 0;
  }
}

// E, Z (but for its sign) and dKh of the warp's rows and channels.
template <int D, Gate kGate>
__device__ void state_products(const Shared<D, kGate>& s, const Lane& at, Accumulators<kGate, D>& acc) {
  constexpr int kN = kWarpTiles<D, kGate>, kUnits = kChannels<D, kGate> / 8;
  const uint32_t d_o = shared_address(s.d_o), y = shared_address(s.y), r = shared_address(s.r);
  const uint32_t state = shared_address(s.of.states.start), d_state = shared_address(s.of.states.d_end);
#pragma unroll 2
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a_o[4], a_y[4], a_r[4];
    const int row = 16 * at.tile + at.lane % 16, unit = 2 * k + at.lane / 16;
    load_matrices(unit_address<D / 8>(d_o, row, unit), a_o);
    load_matrices(unit_address<D / 8>(y, row, unit), a_y);
    load_matrices(unit_address<D / 8>(r, row, unit), a_r);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      const int b_row = 16 * k + at.lane % 16, b_unit = at.half * kN + n + at.lane / 16;
      load_matrices_trans(unit_address<kUnits>(state, b_row, b_unit), b);
      mma_bf16(acc.e[n], a_o, b[0], b[1]);
      mma_bf16(acc.e[n + 1], a_o, b[2], b[3]);
      mma_bf16(acc.z[n], a_y, b[0], b[1]);
      mma_bf16(acc.z[n + 1], a_y, b[2], b[3]);
      load_matrices_trans(unit_address<kUnits>(d_state, b_row, b_unit), b);
      mma_bf16(acc.d_end[n], a_r, b[0], b[1]);
      mma_bf16(acc.d_end[n + 1], a_r, b[2], b[3]);
    }
  }
}

// rowsum(S0 o dS1) of the rows v = w, w + 8, ... of the states.
template <int D, Gate kGate>
__device__ void state_dots(Shared<D, kGate>& s, const Lane& at) {
  constexpr int kC = kLaneChannels<D, kGate>, kUnits = kChannels<D, kGate> / 8;
  float sum[kC] = {};
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    const int v = 8 * i + at.warp;
    float x[kC], dx[kC];
    load_channels<kUnits>(s.of.states.start, v, at.lane, x);
    load_channels<kUnits>(s.of.states.d_end, v, at.lane, dx);
#pragma unroll
    for (int c = 0; c < kC; ++c) sum[c] += x[c] * dx[c];
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) s.flow[at.warp][kC * at.lane + c] = sum[c];
}

// lambda of every row, tau of every tile. z past the document's end stands for gates of 0.
template <int D, Gate kGate>
__device__ void sum_gates(const Arguments& a, const Place& p, int first_channel, const RawRows<D, kGate>& z,
                          Shared<D, kGate>& s, const Lane& at) {
  constexpr int kC = kLaneChannels<D, kGate>, kWidth = kChannels<D, kGate>;
  const HeadGate<D, kGate> gate(a, p, first_channel, at);
  float lambda[8][kC], sum[kC] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x[kC];
    z.get(i, x);
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      if (8 * at.warp + i < p.rows) sum[c] += log2_gate<kGate>(x[c] + gate.bias[c], gate.rate, a.lower_bound);
      lambda[i][c] = sum[c];
    }
  }
#pragma unroll
  for (int c = 0; c < kC; ++c) s.groups[at.warp][kC * at.lane + c] = sum[c];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    const int channel = kC * at.lane + c;
    const float before = at.half == 0 ? 0.0f : s.groups[at.warp - 1][channel];
#pragma unroll
    for (int i = 0; i < 8; ++i) s.of.rows.lambda[float_word<kWidth>(8 * at.warp + i, channel)] = before + lambda[i][c];
    if (at.half == 1) s.tau[at.tile][channel] = before + sum[c];
  }
}

// W of column tile `at.tile`: sum over the rows of dA^T (beta k D) + dP^T (q D), in the scale of its last step.
template <int D, Gate kGate>
__device__ void column_products(const Shared<D, kGate>& s, const Lane& at, float scale,
                                float (&w)[kWarpTiles<D, kGate>][4]) {
  constexpr int kN = kWarpTiles<D, kGate>, kWidth = kChannels<D, kGate>, kUnits = kWidth / 8;
  constexpr int kFirst = kGate == Gate::bounded ? 0 : 1;
  constexpr float kShift = kGate == Gate::bounded ? kTileShift : 0.0f;
  const uint32_t k_tile = shared_address(s.of.rows.k), q_tile = shared_address(s.of.rows.q);
#pragma unroll 1
  for (int i = kTiles - 1; i >= at.tile + kFirst; --i) {
    if (i < kTiles - 1) scale_columns(s.tau[i] + 8 * kN * at.half, at, w);
    uint32_t da[2][4], dp[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      load_tile_trans(s.da + tile_start(i, at.tile), k, at, da[k]);
      load_tile_trans(s.dp + tile_start(i, at.tile), k, at, dp[k]);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t k4[4], q4[4];
      const int unit = at.half * kN + n + at.lane / 16;
      load_matrices_trans(unit_address<kUnits>(k_tile, 16 * i + at.lane % 16, unit), k4);
      load_matrices_trans(unit_address<kUnits>(q_tile, 16 * i + at.lane % 16, unit), q4);
#pragma unroll
      for (int m = 0; m < 4; ++m) {  // rows 8 (m % 2) of the tile, columns 8 (n + m / 2)
        const int row = 16 * i + 8 * (m % 2) + 2 * at.t, channel = 8 * (at.half * kN + n + m / 2) + at.g;
        const float d0 = exp2_fast(s.of.rows.lambda[float_word<kWidth>(row, channel)] - kShift);
        const float d1 = exp2_fast(s.of.rows.lambda[float_word<kWidth>(row + 1, channel)] - kShift);
        const float2 k = floats_of_bf16s(k4[m]), q = floats_of_bf16s(q4[m]);
        mma_tf32(w[n + m / 2], da[m % 2], tf32(k.x * (s.beta[row] * d0)), tf32(k.y * (s.beta[row + 1] * d1)));
        mma_tf32(w[n + m / 2], dp[m % 2], tf32(scale * q.x * d0), tf32(scale * q.y * d1));
      }
    }
  }
}

// X of row tile `at.tile`, from E and Z to their sums with xq and xr, in the scale of its last step.
template <int D, Gate kGate>
__device__ void row_products(const Shared<D, kGate>& s, const Lane& at, float (&e)[kWarpTiles<D, kGate>][4],
                             float (&z)[kWarpTiles<D, kGate>][4]) {
  constexpr int kN = kWarpTiles<D, kGate>, kWidth = kChannels<D, kGate>, kUnits = kWidth / 8;
  constexpr bool kBounded = kGate == Gate::bounded;
  const uint32_t k_tile = shared_address(s.of.rows.k);
  const float first = kBounded ? exp2_fast(kTileShift) : 1.0f;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) e[n][c] *= first, z[n][c] *= -first;
  }
#pragma unroll 1
  for (int j = 0; j < at.tile + (kBounded ? 1 : 0); ++j) {
    const float* tau = s.tau[j] + 8 * kN * at.half;
    if (!kBounded) scale_columns(tau, at, e), scale_columns(tau, at, z);
    uint32_t da[2][4], dp[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      load_tile(s.da + tile_start(at.tile, j), k, at, da[k]);
      load_tile(s.dp + tile_start(at.tile, j), k, at, dp[k]);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t k4[4];
      load_matrices_trans(unit_address<kUnits>(k_tile, 16 * j + at.lane % 16, at.half * kN + n + at.lane / 16), k4);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int row = 16 * j + 8 * (m % 2) + 2 * at.t, channel = 8 * (at.half * kN + n + m / 2) + at.g;
        const float from = kBounded ? kTileShift : s.tau[j][channel];
        const float d0 = exp2_fast(from - s.of.rows.lambda[float_word<kWidth>(row, channel)]);
        const float d1 = exp2_fast(from - s.of.rows.lambda[float_word<kWidth>(row + 1, channel)]);
        const float2 k = floats_of_bf16s(k4[m]);
        const uint32_t b0 = tf32(k.x * d0), b1 = tf32(k.y * d1);
        mma_tf32(e[n + m / 2], dp[m % 2], b0, b1);
        mma_tf32(z[n + m / 2], da[m % 2], b0, b1);
      }
    }
    if (kBounded && j < at.tile) scale_columns(tau, at, e), scale_columns(tau, at, z);
  }
}

// The sums of tau over the tiles behind each.
template <int D, Gate kGate>
__device__ void sum_later_tiles(Shared<D, kGate>& s, const Lane& at) {
  if (at.thread >= kChannels<D, kGate>) return;
  float sum = 0;
  for (int i = kTiles - 1; i >= 0; --i) {
    s.later[i][at.thread] = sum;
    sum += s.tau[i][at.thread];
  }
}

// The pairs of the diagonal tiles where the gate is unbounded, a lane a channel: the even warps xq and xr, the odd
// xc + xp.
template <int D>
__device__ void diagonal_pairs(Shared<D, Gate::unbounded>& s, const Lane& at, float scale) {
  auto& rows = s.of.rows;
  constexpr int kWidth = kChannels<D, Gate::unbounded>;
  const int first = 16 * at.tile, channel = at.lane;
  const float *dp = s.dp + tile_start(at.tile, at.tile), *da = s.da + tile_start(at.tile, at.tile);
  float alpha[16], k[16], sums[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float lambda = rows.lambda[float_word<kWidth>(first + i, channel)];
    alpha[i] = i == 0 ? 0.0f : exp2_fast(lambda - rows.lambda[float_word<kWidth>(first + i - 1, channel)]);
    k[i] = to_float(channel_of<kWidth / 8>(rows.k, first + i, channel));
    sums[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float decay = 1, xq = 0, xr = 0;
    const float q = scale * to_float(channel_of<kWidth / 8>(rows.q, first + i, channel));
    const float beta_k = s.beta[first + i] * k[i];
#pragma unroll
    for (int four = 12; four >= 0; four -= 4) {
      if (four >= i) continue;
      float dp_i[4], da_i[4];
      load_four(dp + tile_word(i, four), dp_i);
      load_four(da + tile_word(i, four), da_i);
#pragma unroll
      for (int j = 3; j >= 0; --j) {
        if (four + j >= i) continue;
        decay *= alpha[four + j + 1];
        if (at.half == 0) {
          xq += dp_i[j] * (k[four + j] * decay);
          xr += da_i[j] * (k[four + j] * decay);
        } else {
          sums[four + j] += (da_i[j] * beta_k + dp_i[j] * q) * decay;
        }
      }
    }
    if (at.half == 0) {
      rows.pairs[0][float_word<kWidth>(first + i, channel)] = xq;
      rows.pairs[1][float_word<kWidth>(first + i, channel)] = xr;
    }
  }
  if (at.half == 0) return;
#pragma unroll
  for (int j = 0; j < 16; ++j) rows.pairs[2][float_word<kWidth>(first + j, channel)] = sums[j];
}

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
      float dq[2], dk[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float k = c == 0 ? k2.x : k2.y, q = a.scale * (c == 0 ? q2.x : q2.y), lambda = rows.lambda[word + c];
        const float tau = s.tau[at.tile][channel + c];
        const float to_row = exp2_fast(lambda - kShift);
        const float from_column = exp2_fast((kGate == Gate::bounded ? kShift : tau) - lambda);
        const float e = acc.e[n][2 * h + c], z = acc.z[n][2 * h + c], w = acc.w[n][2 * h + c];
        float by_q = to_row * e, by_k = to_row * z, column = from_column * w;
        // With the rounded factors of the products, so that what rows take is what columns give.
        float summand = rounded(q * to_row) * e + rounded(k * (beta * to_row)) * z - rounded(k * from_column) * w;
        if constexpr (kGate == Gate::unbounded) {
          const float xq = rows.pairs[0][word + c], xr = rows.pairs[1][word + c], xc = rows.pairs[2][word + c];
          summand += q * xq + k * (beta * xr - xc);
          by_q += xq;
          by_k += xr;
          column += xc;
        }
        const float by_end = exp2_fast(tau - lambda + s.later[at.tile][channel + c]) * acc.d_end[n][2 * h + c];
        d_beta += k * by_k;
        ends[n][c] += k * by_end;
        rows.lambda[word + c] = summand - k * by_end;
        dq[c] = a.scale * (by_q + dp_ii * k);
        dk[c] = beta * by_k + column + by_end + dp_ii * q;
      }
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
      // Nothing passes a decay of 0. The sums would leave their rounding error, which a steep gate multiplies.
      const float dg = slopes.closed ? 0.0f : sums[i][c] + all[c];
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
