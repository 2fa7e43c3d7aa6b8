// What a warp does in one chunk of a scan (scan.cu), and where a block keeps the chunk's tiles.
#pragma once

#include "ops/kda/cuda.h"
#include "ops/kda/cuda/tiles.cuh"

namespace tessera::ops::kda::cuda::chunk_scan {

inline constexpr int kRows = kChunk;

template <int D>
struct Layout {
  static constexpr int kWarps = D >= 64 ? 4 : 2, kThreads = 32 * kWarps;
  static constexpr int kChannels = 16 * kWarps, kSplits = D / kChannels;  // value channels of a block; blocks a head
  static constexpr int kUnits = D / 8, kSquareUnits = kRows / 8, kValueUnits = kChannels / 8;  // of 16 bytes a row
  static constexpr int kTile = kRows * D * 2, kSquare = kRows * kRows * 2;                     // bytes
  static constexpr int kStagingOfWarp = 32 * D > 2048 ? 32 * D : 2048;  // 16 rows of the state, or 16 channels of O
  // Offsets in shared memory. First group: k_start, q_start, v, beta; second: inverse, p; third: k_end, decay.
  static constexpr int kKStart = 0, kQStart = kKStart + kTile, kKEnd = kQStart + kTile, kInverse = kKEnd + kTile;
  static constexpr int kP = kInverse + kSquare, kV = kP + kSquare, kStaging = kV + kRows * kChannels * 2;
  static constexpr int kBeta = kStaging + kWarps * kStagingOfWarp, kDecay = kBeta + kRows * 4;
  static constexpr int kBytes = kDecay + D * 4;
};

template <int D>
using State = float[D / 8][4];  // of a warp: S^T, accumulators of eight key channels each

// Scale of a row in FP16 and its inverse, powers of two: the largest element in [2^14, 2^15), unless that is below
// 2^-27 or above 2^77.
struct Scale {
  float up, down;
  __device__ explicit Scale(float largest) {
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 100), 204);
    up = __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);
    down = __uint_as_float(static_cast<uint32_t>(exponent - 14) << 23);
  }
};

// One warp of a block in one chunk.
template <int D>
struct Warp {
  using L = Layout<D>;
  uint32_t shared;
  const unsigned char* memory;  // the same as an address
  int warp, lane, g, t;
  int row,
      column;  // of the four matrices of an ldmatrix, two by two: this lane's row of 16, and which half of 16 columns

  __device__ explicit Warp(const unsigned char* memory)
      : shared(shared_address(memory)),
        memory(memory),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4),
        row(lane / 16 * 8 + lane % 8),
        column(lane / 8 % 2) {}

  __device__ float2 pair_at(int offset, int i) const {  // elements i and i + 1 of a row of floats
    return *reinterpret_cast<const float2*>(memory + offset + 4 * i);
  }

  // x: beta o (V - Kt S0), o: Qt S0, both transposed.
  template <bool kOutput>
  __device__ void from_state(const State<D>& s, float (&x)[8][4], float (&o)[8][4]) const {
    float largest[2] = {};
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], fabsf(s[c][e]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {  // the four lanes of a row
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], other));
      }
    }
    const Scale scale[2] = {Scale(largest[0]), Scale(largest[1])};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t v[4];
      load_matrices_trans(unit_address<L::kValueUnits>(shared + L::kV, 16 * n + row, 2 * warp + column), v);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = floats_of_bf16s(v[i]);
        x[2 * n + i / 2][i % 2 * 2] = scale[i % 2].up * pair.x;
        x[2 * n + i / 2][i % 2 * 2 + 1] = scale[i % 2].up * pair.y;
      }
    }
    const float up[2] = {-scale[0].up, -scale[1].up};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &s[2 * k + i / 2][i % 2 * 2];
        a[i] = pack_halves(up[i % 2] * pair[0], up[i % 2] * pair[1]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        load_matrices(unit_address<L::kUnits>(shared + L::kKStart, 16 * n + row, 2 * k + column), b);
        mma_f16(x[2 * n], a, b[0], b[1]);
        mma_f16(x[2 * n + 1], a, b[2], b[3]);
        if constexpr (kOutput) {
          load_matrices(unit_address<L::kUnits>(shared + L::kQStart, 16 * n + row, 2 * k + column), b);
          mma_f16(o[2 * n], a, b[0], b[1]);
          mma_f16(o[2 * n + 1], a, b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 beta = pair_at(L::kBeta, 8 * n + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[n][e] *= scale[e / 2].down * (e % 2 == 0 ? beta.x : beta.y);
        if constexpr (kOutput) o[n][e] *= -scale[e / 2].down;
      }
    }
  }

  // c^T += a b^T for the part on and below the diagonal of a square b, column block `k` of eight. a: that of a^T.
  __device__ void add_lower(float (&c)[8][4], const uint32_t (&a)[4], int square, int k) const {
#pragma unroll
    for (int half_of = k / 4; half_of < 2; ++half_of) {
      uint32_t b[4];
      load_matrices(unit_address<L::kSquareUnits>(shared + square, 32 * half_of + lane, k), b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * half_of + i >= k) mma_tf32_halves(c[4 * half_of + i], a, b[i]);
      }
    }
  }

  // r: R^T = X^T diag(beta) M^T, with X weighed by beta as from_state leaves it; o gains R^T P^T. `fragments`: r in
  // TF32.
  template <bool kOutput>
  __device__ void inside(const float (&x)[8][4], float (&o)[8][4], float (&r)[8][4],
                         uint32_t (&fragments)[8][4]) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      uint32_t a[4];
      tf32_fragment(x[k], a);
      add_lower(r, a, L::kInverse, k);  // r[k] has all its terms now
      tf32_fragment(r[k], fragments[k]);
      if constexpr (kOutput) add_lower(o, fragments[k], L::kP, k);
    }
  }

  __device__ void to_next(State<D>& s, const uint32_t (&r)[8][4]) const {
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
      const float2 decay = pair_at(L::kDecay, 8 * c + 2 * t);
      s[c][0] *= decay.x, s[c][1] *= decay.y, s[c][2] *= decay.x, s[c][3] *= decay.y;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        uint32_t b[4];
        load_matrices_trans(unit_address<L::kUnits>(shared + L::kKEnd, 8 * k + lane % 8, 4 * c + lane / 8), b);
#pragma unroll
        for (int i = 0; i < 4; ++i) mma_tf32_halves(s[4 * c + i], r[k], b[i]);
      }
    }
  }

  __device__ uint32_t staging() const { return shared + L::kStaging + warp * L::kStagingOfWarp; }
  __device__ const uint4* staged() const {
    return reinterpret_cast<const uint4*>(memory + L::kStaging + warp * L::kStagingOfWarp);
  }

  // 16 channels of 64 tokens, transposed back, to the first `rows` rows of `to`, which lie `stride` elements apart.
  __device__ void write_tokens(const float (&x)[8][4], bf16* to, int64_t stride, int rows) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &x[2 * n + i / 2][i % 2 * 2];
        pairs[i] = pack_bf16s(pair[0], pair[1]);
      }
      store_matrices_trans(unit_address<2>(staging(), 16 * n + row, column), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * i + lane / 2, unit = lane % 2;
      if (token < rows) *reinterpret_cast<uint4*>(to + token * stride + 8 * unit) = staged()[swizzled<2>(token, unit)];
    }
    __syncwarp();
  }

  // 16 rows of the state, contiguous.
  __device__ void write_state(const State<D>& s, bf16* to) const {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &s[2 * k + i % 2][i / 2 * 2];
        pairs[i] = pack_bf16s(pair[0], pair[1]);
      }
      store_matrices(unit_address<L::kUnits>(staging(), row, 2 * k + column), pairs);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < L::kUnits / 2; ++i) {
      const int u = 32 * i + lane;
      reinterpret_cast<uint4*>(to)[u] = staged()[swizzled<L::kUnits>(u / L::kUnits, u % L::kUnits)];
    }
    __syncwarp();
  }

  // A state's f32 rows of this warp, at this lane's first element.
  __device__ void load(State<D>& s, const float* from) const {
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = *reinterpret_cast<const float2*>(from + (g + 8 * r) * D + 8 * c + 2 * t);
        s[c][2 * r] = pair.x, s[c][2 * r + 1] = pair.y;
      }
    }
  }
  __device__ void store(const State<D>& s, float* to) const {
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        *reinterpret_cast<float2*>(to + (g + 8 * r) * D + 8 * c + 2 * t) = make_float2(s[c][2 * r], s[c][2 * r + 1]);
      }
    }
  }
};

}  // namespace tessera::ops::kda::cuda::chunk_scan
