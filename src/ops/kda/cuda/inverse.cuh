// M = (I + A)^{-1} of a chunk (attention.md 3.4), in f32: each diagonal tile by substitution, a lane a column; then, a
// warp a column of tiles, M_IJ = -M_II sum_K A_IK M_KJ. These are taken transposed, so that accumulators are the next
// operands, in TF32 split in two parts of which three products are kept.
#pragma once

#include "ops/kda/cuda.h"
#include "ops/kda/cuda/tiles.cuh"

namespace tessera::ops::kda::cuda::chunk_inverse {

inline constexpr int kRows = kChunk, kTile = 16, kTiles = kRows / kTile;
// Elements from row to row of a square in shared memory: rows lie 8 (f32) or 4 (FP16) banks apart, and no two lanes of
// a fragment meet in a bank.
inline constexpr int kPitch = kRows + 8;
template <class T>
using Square = T[kRows][kPitch];

struct Lane {
  int warp, lane, g, t;
  __device__ Lane() : warp(threadIdx.x / 32), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4) {}
};

// A diagonal tile of A becomes M of it: rows of M = I - A M, each from the rows above, a lane a column.
__device__ inline void invert_tile(float* tile, int lane) {
  const int column = lane % kTile;
  float m[kTile];
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(tile + i * kPitch + j);
      sum -= a.x * m[j];
      if (j + 1 < i) sum -= a.y * m[j + 1];
      if (j + 2 < i) sum -= a.z * m[j + 2];
      if (j + 3 < i) sum -= a.w * m[j + 3];
    }
    m[i] = sum;
  }
  __syncwarp();
  if (lane >= kTile) return;
#pragma unroll
  for (int i = 0; i < kTile; ++i) tile[i * kPitch + column] = m[i];
}

__device__ inline void split(float x, uint32_t& high, uint32_t& low) {
  high = tf32(x);
  low = tf32(x - __uint_as_float(high));
}

// c += a b^T of 16 x 16 tiles: a two accumulator tiles of neighbouring columns, b in shared memory. To about 21 bits.
__device__ inline void multiply_tile(float (&c)[2][4], const float (&a)[2][4], const float* b, const Lane& l) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kOrder[4] = {0, 2, 1, 3};  // as tf32_fragment
      split(a[k][kOrder[i]], high[i], low[i]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(b + (8 * n + l.g) * kPitch + 8 * k + 2 * l.t);
      uint32_t high0, low0, high1, low1;
      split(pair.x, high0, low0);
      split(pair.y, high1, low1);
      mma_tf32(c[n], low, high0, high1);
      mma_tf32(c[n], high, low0, low1);
      mma_tf32(c[n], high, high0, high1);
    }
  }
}

// Column `warp` of tiles of M, from M's diagonal tiles and A below them in `lower`. m[I] is M_IJ transposed: rows are
// columns of J, columns rows of I.
__device__ inline void invert_column(const Square<float>& lower, Square<half>& inverse, const Lane& l) {
  float m[kTiles][2][4];
  const int column = kTile * l.warp + l.g;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = kTile * i + 8 * n + 2 * l.t;
#pragma unroll
      for (int e = 0; e < 4; ++e) m[i][n][e] = i == l.warp ? lower[row + e % 2][column + e / 2 * 8] : 0.0f;
    }
    if (i > l.warp) {
      float sum[2][4] = {};
#pragma unroll
      for (int k = 0; k < i; ++k) {
        if (k >= l.warp) multiply_tile(sum, m[k], &lower[kTile * i][kTile * k], l);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = -sum[n][e];
      }
      multiply_tile(m[i], sum, &lower[kTile * i][kTile * i], l);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = kTile * i + 8 * n + 2 * l.t;
#pragma unroll
      for (int e = 0; e < 4; ++e) inverse[row + e % 2][column + e / 2 * 8] = __float2half_rn(m[i][n][e]);
    }
  }
}

}  // namespace tessera::ops::kda::cuda::chunk_inverse
