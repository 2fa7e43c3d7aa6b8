// What a warp of KDA's backward scan multiplies: accumulators of 16 value channels, transposed, as FP16 operands.
#pragma once

#include "ops/kda/cuda/backward_tiles.cuh"
#include "ops/kda/cuda/scan.cuh"

namespace tessera::ops::kda::cuda::backward_scan {

using chunk_scan::Scale;

template <int kN>
using Tiles = float[kN][4];  // (16, 8 kN)

// x <- x f of its rows.
template <int kN>
__device__ void scale_rows(Tiles<kN>& x, float low, float high) {
#pragma unroll
  for (int n = 0; n < kN; ++n) x[n][0] *= low, x[n][1] *= low, x[n][2] *= high, x[n][3] *= high;
}

// The scales of rows g and g + 8.
struct RowScales {
  float up[2], down[2];
  __device__ void set(float low, float high) {  // the largest elements that this lane has
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = h == 0 ? low : high;
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
      const Scale scale(largest);
      up[h] = scale.up, down[h] = scale.down;
    }
  }
};

// (16, 8 kN) as the left operand of products: FP16, scaled by rows.
template <int kN>
struct Operand {
  uint32_t a[kN / 2][4];
  RowScales scales;

  __device__ explicit Operand(const Tiles<kN>& x) {
    float largest[2] = {};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], fabsf(x[n][i]));
    }
    scales.set(largest[0], largest[1]);
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &x[2 * k + i / 2][2 * (i % 2)];
        a[k][i] = pack_halves(scales.up[i % 2] * pair[0], scales.up[i % 2] * pair[1]);
      }
    }
  }

  // The warp's 16 columns of a bf16 tile of 8 kN rows, transposed.
  template <int kUnits>
  __device__ static Operand load(const uint4* tile, int warp, int lane) {
    Operand o;
    uint32_t largest[2] = {};  // of pairs: magnitudes of bf16 are ordered as integers
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
      uint32_t r[4];
      load_matrices_trans(unit_address<kUnits>(shared_address(tile), 16 * k + lane % 16, 2 * warp + lane / 16), r);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o.a[k][i] = r[i % 2 * 2 + i / 2];  // two by two matrices, the other way round
        largest[i % 2] = __vmaxu2(largest[i % 2], o.a[k][i] & 0x7fff7fffu);
      }
    }
    const float2 low = floats_of_bf16s(largest[0]), high = floats_of_bf16s(largest[1]);
    o.scales.set(fmaxf(low.x, low.y), fmaxf(high.x, high.y));
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = floats_of_bf16s(o.a[k][i]);
        o.a[k][i] = pack_halves(o.scales.up[i % 2] * x.x, o.scales.up[i % 2] * x.y);
      }
    }
    return o;
  }

 private:
  Operand() = default;
};

// c += X B with B (64, 64) in shared memory, 0 above its diagonal.
__device__ inline void multiply_lower(Tiles<kChunk / 8>& c, const Operand<kChunk / 8>& x, const uint4* b, int lane) {
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
#pragma unroll
    for (int n = 0; n <= k; ++n) {
      uint32_t r[4];
      load_matrices_trans(unit_address<kChunk / 8>(shared_address(b), 16 * k + lane % 16, 2 * n + lane / 16), r);
      mma_f16(c[2 * n], x.a[k], r[0], r[1]);
      mma_f16(c[2 * n + 1], x.a[k], r[2], r[3]);
    }
  }
}

// c (16, D) += X B with B (64, D) in shared memory.
template <int D>
__device__ void multiply_rows(Tiles<D / 8>& c, const Operand<kChunk / 8>& x, const uint4* b, int lane) {
#pragma unroll
  for (int k = 0; k < kChunk / 16; ++k) {
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t r[4];
      load_matrices_trans(unit_address<D / 8>(shared_address(b), 16 * k + lane % 16, 2 * n + lane / 16), r);
      mma_f16(c[2 * n], x.a[k], r[0], r[1]);
      mma_f16(c[2 * n + 1], x.a[k], r[2], r[3]);
    }
  }
}

// c (16, 64) += X B^T, in the scale of X, with B (64, D) in shared memory. Returns the scales.
template <int D>
__device__ RowScales multiply_state(Tiles<kChunk / 8>& c, const Tiles<D / 8>& state, const uint4* b, int lane) {
  const Operand<D / 8> x(state);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kChunk / 16; ++n) {
      uint32_t r[4];
      load_matrices(unit_address<D / 8>(shared_address(b), 16 * n + lane % 16, 2 * k + lane / 16), r);
      mma_f16(c[2 * n], x.a[k], r[0], r[2]);
      mma_f16(c[2 * n + 1], x.a[k], r[1], r[3]);
    }
  }
  return x.scales;
}

// (16, D) accumulators from and to rows of D floats.
template <int D>
__device__ void load_state(const float* from, int g, int t, Tiles<D / 8>& x) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = *reinterpret_cast<const float2*>(from + (g + 8 * h) * D + 8 * n + 2 * t);
      x[n][2 * h] = pair.x, x[n][2 * h + 1] = pair.y;
    }
  }
}
template <int D>
__device__ void store_state(float* to, int g, int t, const Tiles<D / 8>& x) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<float2*>(to + (g + 8 * h) * D + 8 * n + 2 * t) = make_float2(x[n][2 * h], x[n][2 * h + 1]);
    }
  }
}
// The same to bf16, 16 bytes a lane.
template <int D>
__device__ void store_rounded(bf16* to, int g, int t, const Tiles<D / 8>& x) {
#pragma unroll
  for (int n = 0; n < D / 8; n += 4) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack_bf16s(x[n + i][2 * h], x[n + i][2 * h + 1]);
      transpose_quad(w);
      store_words(to + (g + 8 * h) * D + 8 * (n + t), w);
    }
  }
}
// (16 values, 64 tokens) accumulators to rows of tokens, `stride` apart; rows at and past `rows` are not written.
__device__ inline void store_transposed(bf16* to, int64_t stride, int rows, int g, int t, const Tiles<kChunk / 8>& x) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; n += 2) {
    uint32_t w[4];  // tokens of tile n + i / 2, values 8 (i % 2) and following
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = transpose_matrix(pack_bf16s(x[n + i / 2][2 * (i % 2)], x[n + i / 2][2 * (i % 2) + 1]));
    }
    transpose_quad(w);
    const int row = 8 * (n + t / 2) + g;
    if (row < rows) store_words(to + row * stride + 8 * (t % 2), w);
  }
}

}  // namespace tessera::ops::kda::cuda::backward_scan
