// The matrix products of backward_chunk.cu, by a warp of row tile `at.tile` and half `at.half` of a pass's channels.
//
// Decays. D_ij = e^{G_i - G_j} is carried from tile to tile of 16 rows like the state from chunk to chunk: lambda is
// the sum of gates from the start of a row's tile, inclusive, tau that of the whole tile, both in base 2. For the rows
// of tile I and the columns of tile J,
//
//   X = E;  for J < I:                 X <- 2^tau_J X + dP_IJ (k 2^(tau_J - lambda));   xq + e^G E = 2^lambda X
//   W = 0;  for I > J, the last first: W <- 2^tau_I W + dP_IJ^T (q 2^lambda);           xp = 2^(tau_J - lambda) W
//
// xr and Z like the first with dA; xc like the second with dA and beta k. All exponents are <= 0, and no factor depends
// on a row after those it is used for. Where the gate is bounded, the diagonal tile is one more step of both, with
// 2^(shift - lambda) and 2^(lambda - shift): at shift = -58 no factor passes 2^58 (16 gates of -5). Where it is not,
// threads go through its pairs, D a running product. The diagonal of P, which no gate acts on, is left out of all this
// and joined at the end: in dG it would cancel against itself.
#pragma once

#include "ops/kda/cuda/backward_chunk.cuh"

namespace tessera::ops::kda::cuda::backward_chunk {

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
      tessera::cuda::load8(v + 8 * unit, v8);
      tessera::cuda::load8(y + 8 * swizzled<D / 8>(row, unit), y8);
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
    k[i] = tessera::cuda::to_float(channel_of<kWidth / 8>(rows.k, first + i, channel));
    sums[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float decay = 1, xq = 0, xr = 0;
    const float q = scale * tessera::cuda::to_float(channel_of<kWidth / 8>(rows.q, first + i, channel));
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

}  // namespace tessera::ops::kda::cuda::backward_chunk
