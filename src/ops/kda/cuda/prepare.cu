// What a chunk of 64 tokens of one head has by itself: its decayed keys and queries, P, and M = (I + A)^{-1}
// (attention.md 3.2 to 3.4). Bound by memory: q, k, z are read once and five tiles written, at K = 128 48 KB and 64 KB.
//
// A warp owns a tile of 16 rows; lane 4 g + t has rows g and g + 8, and of every 32 channels the 8 that begin at 8 t.
// As the order of a contraction is free, these are fragments of both operands: no value is moved to be multiplied.
// With p the sum of gates from the start of a tile, inclusive, every decay is made of factors of at most 1:
//
//   rows i of tile I, columns j of tile J < I     e^{G_i - G_j} = e^{p_i} e^{tiles between} e^{total_J - p_j}
//     FP16 products; the column factor comes from tile J's warp through shared memory.
//   diagonal tile, bounded gate       factors e^{p_i - 8 l} and e^{8 l - p_j}, within e^{+-40}; TF32 products
//   diagonal tile, unbounded gate     its lower left 8 x 8 block as above with row 7 as the boundary; the two diagonal
//     blocks by y_{i,d} = alpha_i y_{i-1,d-1} (y_{i,0} = k_i, so y_{i,d} = k_{i-d} e^{G_i - G_{i-d}}): running products
//
// Anchors are boundaries before the row or constants, so no bit of a row depends on later rows. The triangle is
// selected after the products.
#include "ops/kda/cuda.h"
#include "ops/kda/cuda/gate.cuh"
#include "ops/kda/cuda/inverse.cuh"
#include "ops/kda/cuda/tiles.cuh"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;
using namespace chunk_inverse;

constexpr int kThreads = 32 * kTiles;

struct Arguments {
  const Chunk* chunks;
  int heads;
  float scale, lower_bound, beta_bound;
  const bf16 *q, *k, *z, *beta_logit;
  const float *a_log, *dt_bias;
  half *k_start, *q_start, *k_end, *p, *inverse;
  float *decay, *beta;
};

struct Shared {
  alignas(16) Square<float> lower;  // A below the diagonal tiles; in them A, then M
  alignas(16) Square<half> p;
  alignas(16) Square<half> inverse;
  uint4 columns[2][kTiles][2][32];  // k e^{total - p} of 32 channels: [of two rounds][tile][row g or g + 8][lane]
  float totals[2][kTiles][32];      // sums of gates over a tile
};

// Two rows by eight channels in pairs of bf16, as a lane owns them.
using Rows = uint32_t[2][4];
__device__ float element(const uint32_t (&pairs)[4], int c) {
  const float2 pair = floats_of_bf16s(pairs[c / 2]);
  return c % 2 == 0 ? pair.x : pair.y;
}
__device__ void load_pairs(const bf16* from, uint32_t (&pairs)[4]) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
}

// Inclusive sums over rows g of eight, as x of lane 4 g + t.
__device__ void sum_rows(float (&x)[8], int g) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float before = __shfl_up_sync(0xffffffffu, x[c], 4 * step);
      if (g >= step) x[c] += before;
    }
  }
}
__device__ float of_row_7(float x, int t) { return __shfl_sync(0xffffffffu, x, 28 + t); }

// Products over channels, for one row tile and the tile of columns it shares a name with.
template <Gate kGate>
struct Diagonal;
template <>
struct Diagonal<Gate::bounded> {
  float kk[2][4] = {}, qk[2][4] = {};  // accumulators of columns 0..7 and 8..15
};
template <>
struct Diagonal<Gate::unbounded> {
  float kk[2][8] = {}, qk[2][8] = {};  // [row g or g + 8][distance to the column], this lane's channels
  float block[4] = {};                 // rows 8..15, columns 0..7: of queries in c0, c1, of keys in c2, c3
};

// Keys and queries with the decays of a tile, as pairs of FP16: two rows by eight channels.
struct Decayed {
  uint32_t k_row[2][4], q_row[2][4];  // times e^{p}
  uint32_t k_column[2][4];            // times e^{total - p}
  float total[8];
};

// `p`: the gates in base 2; becomes their sums over a tile, inclusive. Channels go by in pairs and fours, so that few
// values live at a time.
__device__ void decay_rows(float (&p)[2][8], const Rows& k, const Rows& q, float lower_bound, const Lane& l,
                           Decayed& out, Diagonal<Gate::bounded>& diagonal) {
  const float middle = 8 * kLog2E * lower_bound, unit = exp2_fast(middle);
  sum_rows(p[0], l.g);
  sum_rows(p[1], l.g);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    p[1][c] += of_row_7(p[0][c], l.t);
    out.total[c] = of_row_7(p[1][c], l.t);
  }
#pragma unroll
  for (int c = 0; c < 8; c += 2) {
    float k_row[2][2], q_row[2][2], k_column[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = element(k[r], c + e), up = exp2_fast(p[r][c + e] - middle);
        k_row[r][e] = x * up;
        q_row[r][e] = element(q[r], c + e) * up;
        k_column[r][e] = x * exp2_fast(middle - p[r][c + e]);
      }
    }
    const uint32_t ak[4] = {tf32(k_row[0][0]), tf32(k_row[1][0]), tf32(k_row[0][1]), tf32(k_row[1][1])};
    const uint32_t aq[4] = {tf32(q_row[0][0]), tf32(q_row[1][0]), tf32(q_row[0][1]), tf32(q_row[1][1])};
    const float low = exp2_fast(out.total[c] - middle), high = exp2_fast(out.total[c + 1] - middle);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t b0 = tf32(k_column[r][0]), b1 = tf32(k_column[r][1]);
      mma_tf32(diagonal.kk[r], ak, b0, b1);
      mma_tf32(diagonal.qk[r], aq, b0, b1);
      out.k_row[r][c / 2] = pack_halves(k_row[r][0] * unit, k_row[r][1] * unit);
      out.q_row[r][c / 2] = pack_halves(q_row[r][0] * unit, q_row[r][1] * unit);
      out.k_column[r][c / 2] = pack_halves(k_column[r][0] * low, k_column[r][1] * high);
    }
  }
}

__device__ void decay_rows(float (&p)[2][8], const Rows& k, const Rows& q, float, const Lane& l, Decayed& out,
                           Diagonal<Gate::unbounded>& diagonal) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float alpha = exp2_fast(p[r][c]), x_k = element(k[r], c), x_q = element(q[r], c);
      float y = x_k;
      diagonal.qk[r][0] += x_q * y;
#pragma unroll
      for (int d = 1; d < 8; ++d) {  // lanes of rows before d hold what no one reads
        y = alpha * __shfl_up_sync(0xffffffffu, y, 4);
        diagonal.kk[r][d] += x_k * y;
        diagonal.qk[r][d] += x_q * y;
      }
    }
    sum_rows(p[r], l.g);  // over eight rows only
  }
#pragma unroll
  for (int c = 0; c < 8; c += 4) {
    float k_row[2][4], q_row[2][4], k_column[2][4], first[4], second[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float last[2] = {of_row_7(p[0][c + e], l.t), of_row_7(p[1][c + e], l.t)};
      out.total[c + e] = last[0] + last[1];
      first[e] = exp2_fast(last[0]), second[e] = exp2_fast(last[1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x = element(k[r], c + e), up = exp2_fast(p[r][c + e]);
        k_row[r][e] = x * up;
        q_row[r][e] = element(q[r], c + e) * up;
        k_column[r][e] = x * exp2_fast(last[r] - p[r][c + e]);
      }
    }
    const uint32_t rows[4] = {pack_halves(q_row[1][0], q_row[1][1]), pack_halves(k_row[1][0], k_row[1][1]),
                              pack_halves(q_row[1][2], q_row[1][3]), pack_halves(k_row[1][2], k_row[1][3])};
    mma_f16(diagonal.block, rows, pack_halves(k_column[0][0], k_column[0][1]),
            pack_halves(k_column[0][2], k_column[0][3]));
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int at = (c + e) / 2;
      out.k_row[0][at] = pack_halves(k_row[0][e], k_row[0][e + 1]);
      out.q_row[0][at] = pack_halves(q_row[0][e], q_row[0][e + 1]);
      out.k_row[1][at] = pack_halves(k_row[1][e] * first[e], k_row[1][e + 1] * first[e + 1]);
      out.q_row[1][at] = pack_halves(q_row[1][e] * first[e], q_row[1][e + 1] * first[e + 1]);
      out.k_column[0][at] = pack_halves(k_column[0][e] * second[e], k_column[0][e + 1] * second[e + 1]);
      out.k_column[1][at] = pack_halves(k_column[1][e], k_column[1][e + 1]);
    }
  }
}

// Writes the diagonal tile of A and of P. `beta` is that of rows g and g + 8.
__device__ void write_diagonal(Shared& s, const Lane& l, const Diagonal<Gate::bounded>& of, const float (&beta)[2],
                               float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = 8 * r + l.g;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = 8 * n + 2 * l.t;
      const float *kk = &of.kk[n][2 * r], *qk = &of.qk[n][2 * r];
      *reinterpret_cast<float2*>(&s.lower[kTile * l.warp + i][kTile * l.warp + j]) =
          make_float2(j < i ? beta[r] * kk[0] : 0.0f, j + 1 < i ? beta[r] * kk[1] : 0.0f);
      *reinterpret_cast<uint32_t*>(&s.p[kTile * l.warp + i][kTile * l.warp + j]) =
          pack_halves(j <= i ? scale * qk[0] : 0.0f, j + 1 <= i ? scale * qk[1] : 0.0f);
    }
  }
}

__device__ void write_diagonal(Shared& s, const Lane& l, const Diagonal<Gate::unbounded>& of, const float (&beta)[2],
                               float scale) {
  const int base = kTile * l.warp;
  const auto pair = [&](int i, int j) { return reinterpret_cast<uint32_t*>(&s.p[base + i][base + j]); };
  *pair(l.g, 2 * l.t) = 0;
  *pair(l.g, 8 + 2 * l.t) = 0;
  *pair(8 + l.g, 8 + 2 * l.t) = 0;
  *pair(8 + l.g, 2 * l.t) = pack_halves(scale * of.block[0], scale * of.block[1]);
  *reinterpret_cast<float2*>(&s.lower[base + 8 + l.g][base + 2 * l.t]) =
      make_float2(beta[1] * of.block[2], beta[1] * of.block[3]);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = base + 8 * r + l.g;
#pragma unroll
    for (int d = 0; d < 8; ++d) {
      float kk = of.kk[r][d], qk = of.qk[r][d];
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {  // the four lanes of a row
        if (d > 0) kk += __shfl_xor_sync(0xffffffffu, kk, other);
        qk += __shfl_xor_sync(0xffffffffu, qk, other);
      }
      if (l.t != d % 4 || l.g < d) continue;
      if (d > 0) s.lower[i][i - d] = beta[r] * kk;
      s.p[i][i - d] = __float2half_rn(scale * qk);
    }
  }
}

// A square of shared memory to 64 x 64 of global memory.
__device__ void write_square(const Square<half>& from, half* to) {
#pragma unroll
  for (int u = threadIdx.x; u < kRows * kRows / 8; u += kThreads) {
    reinterpret_cast<uint4*>(to)[u] = *reinterpret_cast<const uint4*>(&from[u / 8][u % 8 * 8]);
  }
}

__device__ uint32_t times(uint32_t pair, float low, float high) {
  const float2 x = floats_of_halves(pair);
  return pack_halves(x.x * low, x.y * high);
}

__device__ void store_times(half* to, const uint32_t (&x)[4], const float (&factor)[8], float scale) {
  uint32_t y[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) y[c] = times(x[c], scale * factor[2 * c], scale * factor[2 * c + 1]);
  *reinterpret_cast<uint4*>(to) = make_uint4(y[0], y[1], y[2], y[3]);
}

// c += the products of 16 rows with eight columns over a lane's eight channels.
__device__ void add_products(float (&c)[4], const uint32_t (&row)[2][4], const uint4& column) {
  const uint32_t first[4] = {row[0][0], row[1][0], row[0][1], row[1][1]};
  const uint32_t second[4] = {row[0][2], row[1][2], row[0][3], row[1][3]};
  mma_f16(c, first, column.x, column.y);
  mma_f16(c, second, column.z, column.w);
}

// Asks for the chunk's rows of z, k and q: the rounds that follow take 64 bytes of each row at a time.
template <int D>
__device__ void prefetch_rows(const Arguments& a, const Chunk& chunk, int head) {
  constexpr int kLine = 64, kLines = (D + kLine - 1) / kLine;  // elements; of a row
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kLines; i += kThreads) {
    const int row = i / kLines;
    if (row >= chunk.rows) break;
    const int64_t at = ((chunk.token + row) * a.heads + head) * D + i % kLines * kLine;
    for (const bf16* x : {a.z + at, a.k + at, a.q + at}) prefetch(x);
  }
}

template <int D, Gate kGate>
__global__ void __launch_bounds__(kThreads, 3) prepare_kernel(const __grid_constant__ Arguments a) {
  __shared__ Shared s;
  const Lane l;
  const int64_t item = blockIdx.x;  // chunk by chunk, so that neighbouring blocks read neighbouring memory
  const int head = static_cast<int>(item % a.heads);
  const Chunk chunk = a.chunks[item / a.heads];
  const float rate = gate_rate(a.a_log, head);
  const int64_t token = (chunk.token + kTile * l.warp + l.g) * a.heads + head, step = 8 * int64_t(a.heads);
  const bool real[2] = {kTile * l.warp + l.g < chunk.rows, kTile * l.warp + 8 + l.g < chunk.rows};
  const int64_t from = token * D + 8 * l.t, to = (item * kRows + kTile * l.warp + l.g) * D + 8 * l.t;

  prefetch_rows<D>(a, chunk, head);
  Diagonal<kGate> diagonal;
  float kk[kTiles - 1][2][4] = {}, qk[kTiles - 1][2][4] = {};  // below the diagonal: [column tile][half of it]
#pragma unroll 1
  for (int m = 0; m < D / 32; ++m) {
    Rows z = {}, k = {}, q = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!real[r]) continue;
      load_pairs(a.z + from + r * step * D + 32 * m, z[r]);
      load_pairs(a.k + from + r * step * D + 32 * m, k[r]);
      load_pairs(a.q + from + r * step * D + 32 * m, q[r]);
    }
    float bias[8], p[2][8];
    load8(a.dt_bias + head * D + 32 * m + 8 * l.t, bias);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        p[r][c] = log2_gate<kGate>(element(z[r], c) + bias[c], rate, a.lower_bound);
        if (!real[r]) p[r][c] = 0;
      }
    }
    Decayed d;
    decay_rows(p, k, q, a.lower_bound, l, d, diagonal);

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s.columns[m % 2][l.warp][r][l.lane] =
          make_uint4(d.k_column[r][0], d.k_column[r][1], d.k_column[r][2], d.k_column[r][3]);
    }
    if (l.g == 0) store8(&s.totals[m % 2][l.warp][8 * l.t], d.total);
    __syncthreads();  // two rounds share memory alternately: one barrier a round is enough

    // Sums of gates: `before`, over the tiles between, in the end over all before; `after`, over all after.
    float before[8] = {}, after[8] = {};
#pragma unroll
    for (int j = kTiles - 2; j >= 0; --j) {
      if (j >= l.warp) continue;
      uint4 columns[2] = {s.columns[m % 2][j][0][l.lane], s.columns[m % 2][j][1][l.lane]};
      if (j + 1 < l.warp) {
        float between[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) between[c] = exp2_fast(before[c]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          columns[n].x = times(columns[n].x, between[0], between[1]);
          columns[n].y = times(columns[n].y, between[2], between[3]);
          columns[n].z = times(columns[n].z, between[4], between[5]);
          columns[n].w = times(columns[n].w, between[6], between[7]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        add_products(kk[j][n], d.k_row, columns[n]);
        add_products(qk[j][n], d.q_row, columns[n]);
      }
      float total[8];
      load8(&s.totals[m % 2][j][8 * l.t], total);
#pragma unroll
      for (int c = 0; c < 8; ++c) before[c] += total[c];
    }
#pragma unroll
    for (int j = 1; j < kTiles; ++j) {
      if (j <= l.warp) continue;
      float total[8];
      load8(&s.totals[m % 2][j][8 * l.t], total);
#pragma unroll
      for (int c = 0; c < 8; ++c) after[c] += total[c];
    }
    if (l.warp == kTiles - 1 && l.g == 0) {
      float end[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) end[c] = exp2_fast(before[c] + d.total[c]);
      store8(a.decay + item * D + 32 * m + 8 * l.t, end);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) before[c] = exp2_fast(before[c]), after[c] = exp2_fast(after[c]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t at = to + 8 * r * D + 32 * m;
      store_times(a.k_start + at, d.k_row[r], before, 1.0f);
      store_times(a.q_start + at, d.q_row[r], before, a.scale);
      store_times(a.k_end + at, d.k_column[r], after, 1.0f);
    }
  }

  float beta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    beta[r] = real[r] ? beta_of(to_float(a.beta_logit[token + r * step]), a.beta_bound) : 0.0f;
    if (l.t == 0) a.beta[item * kRows + kTile * l.warp + 8 * r + l.g] = beta[r];
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (j == l.warp) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = kTile * l.warp + 8 * r + l.g, column = kTile * j + 8 * n + 2 * l.t;
        uint32_t pair = 0;
        if (j < kTiles - 1 && j < l.warp) {
          const int slot = j < kTiles - 1 ? j : 0;
          *reinterpret_cast<float2*>(&s.lower[row][column]) =
              make_float2(beta[r] * kk[slot][n][2 * r], beta[r] * kk[slot][n][2 * r + 1]);
          pair = pack_halves(a.scale * qk[slot][n][2 * r], a.scale * qk[slot][n][2 * r + 1]);
        }
        *reinterpret_cast<uint32_t*>(&s.p[row][column]) = pair;
      }
    }
  }
  write_diagonal(s, l, diagonal, beta, a.scale);
  __syncwarp();
  invert_tile(&s.lower[kTile * l.warp][kTile * l.warp], l.lane);
  __syncthreads();
  invert_column(s.lower, s.inverse, l);
  __syncthreads();
  write_square(s.p, a.p + item * kRows * kRows);
  write_square(s.inverse, a.inverse + item * kRows * kRows);
}

template <int D>
void launch_prepare(GpuStream stream, const Dims& d, int64_t blocks, const Arguments& a) {
  if (d.gate == Gate::bounded) {
    launch(prepare_kernel<D, Gate::bounded>, blocks, kThreads, 0, stream)(a);
  } else {
    launch(prepare_kernel<D, Gate::unbounded>, blocks, kThreads, 0, stream)(a);
  }
}

}  // namespace

void prepare(GpuStream stream, const Dims& d, const Inputs& in, const Plan& plan, const Workspace& w) {
  fill_lists(stream, in.documents, plan, w);
  const Arguments a{.chunks = reinterpret_cast<const Chunk*>(w.chunks.gpu<int64_t>()),
                    .heads = static_cast<int>(d.heads),
                    .scale = query_scale(d),
                    .lower_bound = static_cast<float>(d.lower_bound),
                    .beta_bound = d.negative_eigenvalues ? 2.0f : 1.0f,
                    .q = in.q.gpu<bf16>(),
                    .k = in.k.gpu<bf16>(),
                    .z = in.z.gpu<bf16>(),
                    .beta_logit = in.beta_logit.gpu<bf16>(),
                    .a_log = in.a_log.present() ? in.a_log.gpu<float>() : nullptr,
                    .dt_bias = in.dt_bias.gpu<float>(),
                    .k_start = halves(w.k_start),
                    .q_start = halves(w.q_start),
                    .k_end = halves(w.k_end),
                    .p = halves(w.p),
                    .inverse = halves(w.inverse),
                    .decay = w.decay.gpu<float>(),
                    .beta = w.beta.gpu<float>()};
  const int64_t blocks = plan.chunks * d.heads;
  if (d.key_dim == 32) return launch_prepare<32>(stream, d, blocks, a);
  if (d.key_dim == 64) return launch_prepare<64>(stream, d, blocks, a);
  launch_prepare<128>(stream, d, blocks, a);
}

}  // namespace tessera::ops::kda::cuda
