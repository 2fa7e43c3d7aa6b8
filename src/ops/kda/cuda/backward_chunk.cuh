// Pieces of backward_chunk.cu: arguments, shared memory, who does what, loads and stores.
#pragma once

#include <type_traits>

#include "ops/kda/cuda/backward_tiles.cuh"
#include "ops/kda/cuda/gate.cuh"
#include "ops/kda/cuda_backward.h"

namespace tessera::ops::kda::cuda::backward_chunk {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTiles = kChunk / 16;  // of 16 rows
constexpr float kTileShift = -58;    // half of the decay of a tile at the steepest bounded gate, in base 2
constexpr int kTileWords = 16 * 16;  // of a tile of dP or dA
constexpr int kLowerTiles = kTiles * (kTiles + 1) / 2;

// Key channels of a pass, of a lane in the gates, and tiles of 8 channels of a warp in the products.
template <int D, Gate kGate>
constexpr int kChannels = kGate == Gate::bounded&& D >= 64 ? 64 : 32;
template <int D, Gate kGate>
constexpr int kLaneChannels = kChannels<D, kGate> / 32;
template <int D, Gate kGate>
constexpr int kWarpTiles = kChannels<D, kGate> / 16;

// Floats from row to row of a pass.
template <int kWidth>
constexpr int kPitch = kWidth == 64 ? kWidth + 4 : kWidth;

struct Arguments {
  int64_t heads;
  float scale, lower_bound;
  const Chunk* chunks;
  const bf16 *q, *k, *v, *z, *beta_logit, *d_o;
  const float *a_log, *dt_bias;  // a_log may be null
  const float* beta;
  const bf16 *states, *r, *d_states, *y;
  bf16 *dq, *dk, *dz, *d_beta_logit;
  float* partials;
};

struct Place {
  __device__ explicit Place(const Arguments& a) : head(int(blockIdx.x % a.heads)) {
    const Chunk c = a.chunks[blockIdx.x / a.heads];
    first = c.token * a.heads + head;
    rows = c.rows;
  }
  __device__ int64_t index() const { return blockIdx.x; }  // of the chunk and head in the workspaces
  __device__ int64_t row_offset(const Arguments& a, int row, int width) const {
    return (first + row * a.heads) * width;
  }
  int64_t first;   // row of the activations, seen as (T H, width)
  int head, rows;  // rows: the valid ones
};

// The thread's number, made anew: addresses that follow from it are not kept in registers from one use to the next.
__device__ inline int thread_number() {
  int thread = int(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}
struct Lane {
  int thread = thread_number();
  int warp = thread / 32, lane = thread % 32;
  int tile = warp / 2, half = warp % 2, g = lane / 4, t = lane % 4;
};

template <int D, Gate kGate>
struct alignas(16) Shared {
  static constexpr int kWidth = kChannels<D, kGate>;
  uint4 r[kChunk * D / 8], d_o[kChunk * D / 8], y[kChunk * D / 8];
  union {
    struct {
      uint4 start[D * kWidth / 8], d_end[D * kWidth / 8];  // S0 and dS1, rows of values
    } states;
    struct {
      uint4 k[kChunk * kWidth / 8], q[kChunk * kWidth / 8];
      float lambda[kChunk * kPitch<kWidth>];  // float_word
      float pairs[kGate == Gate::unbounded ? 3 : 1][kGate == Gate::unbounded ? kChunk * kWidth : 4];
    } rows;
  } of;
  float dp[kLowerTiles * kTileWords], da[kLowerTiles * kTileWords];  // tile_start, tile_word
  float dp_diagonal[kChunk], beta[kChunk], d_beta[2][kChunk];        // d_beta: by half of the warps
  float tau[kTiles][kWidth], later[kTiles][kWidth], ends[kTiles][kWidth];
  float groups[kWarps][kWidth], flow[kWarps][kWidth];  // by rows of a warp
};

template <Gate kGate, int D>
struct Accumulators {
  float e[kWarpTiles<D, kGate>][4], z[kWarpTiles<D, kGate>][4];      // E, Z; then with xq, xr
  float d_end[kWarpTiles<D, kGate>][4], w[kWarpTiles<D, kGate>][4];  // dKh; xc + xp
};

// ---- f32 tiles in shared memory ----

__device__ inline float2 pair_at(const float* from) { return *reinterpret_cast<const float2*>(from); }
// Tile (i, j) of the lower triangle, and a place in it: neither fragments of the tile nor of its transpose meet in a
// bank.
__device__ inline int tile_start(int i, int j) { return (i * (i + 1) / 2 + j) * kTileWords; }
__device__ inline int tile_word(int row, int column) {
  return (row ^ (row >> 2 & 1)) * 16 + (column ^ (row >> 1 & 1) * 8);
}
// Step k of a 16 x 16 tile, and of its transpose, as A fragments.
__device__ inline void load_tile(const float* tile, int k, const Lane& at, uint32_t (&a)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 x = pair_at(tile + tile_word(at.g + 8 * h, 8 * k + 2 * at.t));
    a[h] = __float_as_uint(x.x);
    a[2 + h] = __float_as_uint(x.y);
  }
}
__device__ inline void load_tile_trans(const float* tile, int k, const Lane& at, uint32_t (&a)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    a[h] = __float_as_uint(tile[tile_word(8 * k + 2 * at.t, at.g + 8 * h)]);
    a[2 + h] = __float_as_uint(tile[tile_word(8 * k + 2 * at.t + 1, at.g + 8 * h)]);
  }
}
__device__ inline void load_four(const float* from, float (&x)[4]) {
  const float4 raw = *reinterpret_cast<const float4*>(from);
  x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
}
// A place in rows of channels: rows 2 t at channel g lie in different banks, by a longer pitch where the memory allows
// (its addresses are constants apart), else by exchanging channels. Pairs of channels stay neighbours.
template <int kWidth>
__device__ int float_word(int row, int channel) {
  return row * kPitch<kWidth> + (kPitch<kWidth> > kWidth ? channel : channel ^ row / 2 % 4 * 8);
}

__device__ inline float rounded(float x) { return __uint_as_float(tf32(x)); }

// w <- w 2^tau of its columns.
template <int kN>
__device__ void scale_columns(const float* tau, const Lane& at, float (&w)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float f0 = exp2_fast(tau[8 * n + 2 * at.t]), f1 = exp2_fast(tau[8 * n + 2 * at.t + 1]);
    w[n][0] *= f0, w[n][1] *= f1, w[n][2] *= f0, w[n][3] *= f1;
  }
}
__device__ inline float sum_over_rows(float x) {  // of the eight lanes of one t
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// ---- bf16 tiles in shared memory, element by element ----

template <int kUnits>
__device__ uint32_t word_of(const uint4* tile, int row, int unit, int t) {
  return reinterpret_cast<const uint32_t*>(tile + swizzled<kUnits>(row, unit))[t];
}
template <int kUnits>
__device__ bf16 channel_of(const uint4* tile, int row, int channel) {
  return reinterpret_cast<const bf16*>(tile + swizzled<kUnits>(row, channel / 8))[channel % 8];
}
template <int kUnits>
__device__ void load_channels(const uint4* tile, int row, int lane, float (&x)[2]) {
  const float2 pair = floats_of_bf16s(word_of<kUnits>(tile, row, lane / 4, lane % 4));
  x[0] = pair.x, x[1] = pair.y;
}
template <int kUnits>
__device__ void load_channels(const uint4* tile, int row, int lane, float (&x)[1]) {
  x[0] = tessera::cuda::to_float(channel_of<kUnits>(tile, row, lane));
}

// ---- global memory ----

// Asks for what the passes will load and the first does not at once.
template <int D, Gate kGate>
__device__ void ask_for_passes(const Arguments& a, const Place& p, const Lane& at) {
  constexpr int kLines = D >= 64 ? D / 64 : 1;  // of 128 bytes, a row
  if (at.thread < p.rows * kLines) {
    const int64_t from = p.row_offset(a, at.thread / kLines, D) + at.thread % kLines * 64;
    for (const bf16* rows : {a.k, a.q, a.z, a.v}) prefetch(rows + from);
  } else if (at.thread >= kThreads - D * (kLines - 1)) {
    const int row = kThreads - 1 - at.thread;
    for (const bf16* states : {a.states, a.d_states}) prefetch(states + (p.index() * D + row) * D + 64);
  }
}
// R, dO, Y.
template <int D, Gate kGate>
__device__ void fetch_rows(const Arguments& a, const Place& p, Shared<D, kGate>& s) {
  copy_tile_async<kChunk, D / 8, kThreads>(shared_address(s.r), a.r + p.index() * kChunk * D);
  copy_tile_async<kChunk, D / 8, kThreads>(shared_address(s.y), a.y + p.index() * kChunk * D);
#pragma unroll
  for (int i = 0; i < kChunk * D / 8 / kThreads; ++i) {
    const int u = i * kThreads + int(threadIdx.x), row = u / (D / 8), unit = u % (D / 8);
    const bool valid = row < p.rows;
    copy_async(unit_address<D / 8>(shared_address(s.d_o), row, unit),
               a.d_o + p.row_offset(a, valid ? row : 0, D) + 8 * unit, valid);
  }
  commit_copies();
}
// S0 and dS1 of the channels of a pass.
template <int D, Gate kGate>
__device__ void fetch_states(const Arguments& a, const Place& p, int first_channel, Shared<D, kGate>& s,
                             const Lane& at) {
  constexpr int kUnits = kChannels<D, kGate> / 8;
  const int64_t first = p.index() * D * D + first_channel;
#pragma unroll
  for (int i = 0; i < (D * kUnits + kThreads - 1) / kThreads; ++i) {
    const int u = i * kThreads + at.thread, row = u / kUnits, unit = u % kUnits;
    if (row >= D) continue;
    copy_async(unit_address<kUnits>(shared_address(s.of.states.start), row, unit),
               a.states + first + row * D + 8 * unit);
    copy_async(unit_address<kUnits>(shared_address(s.of.states.d_end), row, unit),
               a.d_states + first + row * D + 8 * unit);
  }
  commit_copies();
}
// k and q of the channels of a pass, in the place of the states.
template <int D, Gate kGate>
__device__ void fetch_keys(const Arguments& a, const Place& p, int first_channel, Shared<D, kGate>& s, const Lane& at) {
  constexpr int kUnits = kChannels<D, kGate> / 8;
#pragma unroll
  for (int i = 0; i < kChunk * kUnits / kThreads; ++i) {
    const int u = i * kThreads + at.thread, row = u / kUnits, unit = u % kUnits;
    const bool valid = row < p.rows;
    const int64_t from = p.row_offset(a, valid ? row : 0, D) + first_channel + 8 * unit;
    copy_async(unit_address<kUnits>(shared_address(s.of.rows.k), row, unit), a.k + from, valid);
    copy_async(unit_address<kUnits>(shared_address(s.of.rows.q), row, unit), a.q + from, valid);
  }
  commit_copies();
}
// z of the eight rows of a warp, the lane's channels.
template <int D, Gate kGate>
struct RawRows {
  static constexpr int kC = kLaneChannels<D, kGate>;
  using Raw = std::conditional_t<kC == 2, uint32_t, uint16_t>;
  Raw raw[8];

  __device__ void load(const Arguments& a, const Place& p, int first_channel, const Lane& at) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * at.warp + i;
      raw[i] = 0;
      if (row >= p.rows) continue;
      raw[i] = *reinterpret_cast<const Raw*>(a.z + p.row_offset(a, row, D) + first_channel + kC * at.lane);
    }
  }
  __device__ void get(int i, float (&x)[kC]) const {
    const float2 pair = floats_of_bf16s(raw[i]);
    x[0] = pair.x;
    if constexpr (kC == 2) x[1] = pair.y;
  }
};
__device__ inline void store_channels(bf16* to, const float (&x)[2]) {
  *reinterpret_cast<uint32_t*>(to) = pack_bf16s(x[0], x[1]);
}
__device__ inline void store_channels(bf16* to, const float (&x)[1]) { *to = tessera::cuda::from_float<bf16>(x[0]); }

// The pairs w[i][n], channels 8 n + 2 t of a row each, to `first` (i = 0) and `second`: 16 bytes a lane.
template <int kN>
__device__ void store_pieces(bf16* first, bf16* second, bool valid, const Lane& at, const uint32_t (&w)[2][kN]) {
#pragma unroll
  for (int i = 0; i < 2 * kN; i += 4) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = w[(i + j) / kN][(i + j) % kN];
    transpose_quad(words);
    const int which = i + at.t;
    if (valid) store_words((which < kN ? first : second) + 8 * (which % kN), words);
  }
}

// ---- the gate ----

template <int D, Gate kGate>
struct HeadGate {
  static constexpr int kC = kLaneChannels<D, kGate>;
  __device__ HeadGate(const Arguments& a, const Place& p, int first_channel, const Lane& at)
      : rate(gate_rate(a.a_log, p.head)) {
#pragma unroll
    for (int c = 0; c < kC; ++c) bias[c] = a.dt_bias[int64_t{D} * p.head + first_channel + kC * at.lane + c];
  }
  float rate, bias[kC];
};

struct GateSlopes {
  float by_x, by_a_log;  // dg/dx, dg/dA_log
};
// What passes a decay below this is less than the rounding errors of the sums it is found by, which a steep gate would
// multiply: taken for 0.
constexpr float kClosedLog2Gate = -24;

// sigmoid (1 - sigmoid) is e / (1 + e)^2 with e = exp(-|u|): no cancellation where the sigmoid saturates, exactly 0
// where it has, and 0 times infinity is not formed.
template <Gate kGate>
__device__ GateSlopes gate_slopes(float x, float a, float lower_bound) {
  if constexpr (kGate == Gate::bounded) {
    const float u = a * x, e = exp2_fast(-kLog2E * fabsf(u)), d = __fdividef(1.0f, 1.0f + e);
    const float slope = lower_bound * e * d * d;
    return {a * slope, slope == 0 ? 0.0f : slope * u};
  } else {
    const float g2 = log2_gate<kGate>(x, a, lower_bound);
    if (g2 < kClosedLog2Gate) return {0, 0};
    const float e = exp2_fast(-kLog2E * fabsf(x)), d = __fdividef(1.0f, 1.0f + e);
    return {-a * (x < 0 ? e * d : d), g2 / kLog2E};
  }
}

template <int D, Gate kGate>
constexpr bool kTwoFit = sizeof(Shared<D, kGate>) <= 113 * 1024;
static_assert(kTwoFit<128, Gate::bounded> && kTwoFit<128, Gate::unbounded>);

}  // namespace tessera::ops::kda::cuda::backward_chunk
