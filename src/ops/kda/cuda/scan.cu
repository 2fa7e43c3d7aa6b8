// The state through the chunks of a piece (attention.md 3.2, schedule b), everything transposed: with X, R, O of a
// chunk and the state S0 it begins from,
//
//   X^T = V^T - S0^T Kt^T     R^T = (X^T diag(beta)) M^T     O^T = S0^T Qt^T + R^T P^T     S1^T = S0^T diag(e^{G_L}) +
//   R^T Kh
//
// so that value channels are independent: a warp owns 16 of them and its S^T, 16 x K, stays in registers, as
// accumulators of the last product and operands of the first, from the first chunk to the last. Warps of a block share
// the tiles of the chunk in shared memory. Each of three groups of tiles has one place there, filled again by cp.async
// as soon as all warps have used it: two thirds of a chunk ahead, so that two blocks fit an SM and cover each other's
// barriers.
//
// Products with the state are FP16 x FP16: S^T in FP16 has the same 10 bits that TF32 would leave it, at twice the rate
// and with no conversion of the other operand. The range of FP16 does not matter: each row is scaled by the power of
// two that brings its largest element to 2^14, and the accumulators by its inverse. The scale is taken from the state,
// so from earlier chunks; X and R could only be scaled by the whole chunk, which would let later tokens reach earlier
// bits, and are TF32. Carried, the state is f32.
//
// Documents that are cut (cuda.h: Piece) are scanned three times: `piece_ends` finds, for the pieces at once, where
// each would lead from 0 and how its end depends on its start, `fold` chains them in f32, `scan` runs every piece from
// its true start. The first piece's end is found from the true start, so that only documents of three pieces differ,
// and only from the third on, from a scan in one go: no bit of a token depends on the document's length.
//
// Floor at K = V = 128: 64 KB of tiles and 32 KB of V and O a chunk and head; 328 products of 16 x 8 x 8 (16 in FP16) a
// warp and chunk.
#include "ops/kda/cuda.h"
#include "ops/kda/cuda/tiles.cuh"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kRows = kChunk;

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

struct Arguments {
  const Chunk* chunks;
  const Piece* pieces;
  int heads;
  const bf16* v;
  const half *k_start, *q_start, *k_end, *p, *inverse;
  const float *decay, *beta, *initial_state;
  float *ends, *transitions;  // null unless documents are cut
  float* final_state;         // what is not wanted is null, from here on
  bf16 *o, *states, *r;
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

// The tiles of a piece's chunks for one block; each group is committed, empty past the last chunk.
template <int D, bool kOutput>
struct Tiles {
  using L = Layout<D>;
  const Arguments& a;
  uint32_t shared;
  int64_t first;  // (chunk, head) of the first chunk; a.heads further with each chunk
  const bf16* v;  // of the first chunk's first token, this block's channels
  int chunks;
  int64_t tokens;  // of the piece that have values; 0: all values are 0

  __device__ int64_t item(int chunk) const { return first + int64_t(chunk) * a.heads; }

  template <int kBytes>
  __device__ void copy_floats(int to, const float* from) const {
    const int u = static_cast<int>(threadIdx.x);
    if (u < kBytes / 16) copy_async(shared + to + 16 * u, from + 4 * u);
  }
  __device__ void first_group(int chunk) const {
    if (chunk < chunks) {
      copy_tile_async<kRows, L::kUnits, L::kThreads>(shared + L::kKStart, a.k_start + item(chunk) * kRows * D);
      if (kOutput) {
        copy_tile_async<kRows, L::kUnits, L::kThreads>(shared + L::kQStart, a.q_start + item(chunk) * kRows * D);
      }
#pragma unroll
      for (int i = 0; i < kRows * L::kValueUnits / L::kThreads; ++i) {
        const int u = i * L::kThreads + static_cast<int>(threadIdx.x), unit = u % L::kValueUnits;
        const int64_t token = int64_t(chunk) * kRows + u / L::kValueUnits;
        const bool real = token < tokens;
        copy_async(unit_address<L::kValueUnits>(shared + L::kV, u / L::kValueUnits, unit),
                   v + (real ? token : 0) * a.heads * D + 8 * unit, real);
      }
      copy_floats<kRows * 4>(L::kBeta, a.beta + item(chunk) * kRows);
    }
    commit_copies();
  }
  __device__ void second_group(int chunk) const {
    if (chunk < chunks) {
      const int64_t at = item(chunk) * kRows * kRows;
      copy_tile_async<kRows, L::kSquareUnits, L::kThreads>(shared + L::kInverse, a.inverse + at);
      if (kOutput) copy_tile_async<kRows, L::kSquareUnits, L::kThreads>(shared + L::kP, a.p + at);
    }
    commit_copies();
  }
  __device__ void third_group(int chunk) const {
    copy_tile_async<kRows, L::kUnits, L::kThreads>(shared + L::kKEnd, a.k_end + item(chunk) * kRows * D);
    copy_floats<D * 4>(L::kDecay, a.decay + item(chunk) * D);
    commit_copies();
  }
};

// Every chunk: three products, each after its group has arrived and before its place is filled anew. In the order of
// commits a group is followed by one other when it is waited for.
template <int D, bool kOutput, bool kRecord>
__device__ void scan_chunks(const Arguments& a, const Warp<D>& w, const Tiles<D, kOutput>& tiles, int64_t token,
                            int head, int channel, State<D>& s) {
  tiles.first_group(0);
  tiles.second_group(0);
  for (int chunk = 0; chunk < tiles.chunks; ++chunk) {
    const int64_t item = tiles.item(chunk), done = int64_t(chunk) * kRows;
    if constexpr (kRecord) w.write_state(s, a.states + (item * D + channel) * D);
    float x[8][4], o[8][4] = {}, r[8][4] = {};
    uint32_t fragments[8][4];
    wait_copies<1>();
    __syncthreads();
    tiles.third_group(chunk);
    w.template from_state<kOutput>(s, x, o);
    wait_copies<1>();
    __syncthreads();
    tiles.first_group(chunk + 1);
    w.template inside<kOutput>(x, o, r, fragments);
    if constexpr (kOutput) {
      const int64_t left = tiles.tokens - done;
      w.write_tokens(o, a.o + ((token + done) * a.heads + head) * D + channel, int64_t(a.heads) * D,
                     left < kRows ? static_cast<int>(left) : kRows);
    }
    if constexpr (kRecord) w.write_tokens(r, a.r + item * kRows * D + channel, D, kRows);
    wait_copies<1>();
    __syncthreads();
    tiles.second_group(chunk + 1);
    w.to_next(s, fragments);
  }
  wait_copies<0>();
}

__device__ int64_t tokens_of(const Arguments& a, const Piece& piece, int64_t first_token) {
  if (piece.chunks == 0) return 0;
  const Chunk last = a.chunks[piece.first_chunk + piece.chunks - 1];
  return last.token + last.rows - first_token;
}

template <int D, bool kOutput, bool kRecord>
__global__ void __launch_bounds__(Layout<D>::kThreads, 2) scan_kernel(const __grid_constant__ Arguments a) {
  using L = Layout<D>;
  extern __shared__ __align__(128) unsigned char memory[];
  const Warp<D> w(memory);
  const int split = static_cast<int>(blockIdx.x % L::kSplits);
  const int64_t index = blockIdx.x / L::kSplits / a.heads;
  const int head = static_cast<int>(blockIdx.x / L::kSplits % a.heads), channel = split * L::kChannels + 16 * w.warp;
  const Piece piece = a.pieces[index];
  const int64_t of_document = (int64_t(piece.document) * a.heads + head) * D * D + int64_t(channel) * D;
  const int64_t of_piece = (index * a.heads + head) * D * D + int64_t(channel) * D;

  State<D> s = {};
  if (piece.index > 0) {
    w.load(s, a.ends + of_piece - int64_t(a.heads) * D * D);
  } else if (piece.count > 1) {
    w.load(s, a.transitions + of_piece);  // a copy of the initial state, which the final state may overwrite
  } else if (a.initial_state != nullptr) {
    w.load(s, a.initial_state + of_document);
  }
  const int64_t token = piece.chunks > 0 ? a.chunks[piece.first_chunk].token : 0;
  const Tiles<D, kOutput> tiles{a,
                                w.shared,
                                piece.first_chunk * a.heads + head,
                                a.v + (token * a.heads + head) * D + split * L::kChannels,
                                piece.chunks,
                                tokens_of(a, piece, token)};
  scan_chunks<D, kOutput, kRecord>(a, w, tiles, token, head, channel, s);
  if (a.final_state != nullptr && piece.index == piece.count - 1) w.store(s, a.final_state + of_document);
}

// Of the pieces of documents that are cut, but the last: `ends`, the state each leads to, the first from its true start
// and the others from 0; and `transitions`, the state each leads to from S^T = I without values. The first needs no
// transition; its place takes a copy of the initial state.
template <int D>
__global__ void __launch_bounds__(Layout<D>::kThreads, 2) piece_ends_kernel(const __grid_constant__ Arguments a) {
  using L = Layout<D>;
  extern __shared__ __align__(128) unsigned char memory[];
  const Warp<D> w(memory);
  const int part = static_cast<int>(blockIdx.x % (2 * L::kSplits)), split = part % L::kSplits;
  const bool transition = part >= L::kSplits;
  const int64_t index = blockIdx.x / (2 * L::kSplits) / a.heads;
  const int head = static_cast<int>(blockIdx.x / (2 * L::kSplits) % a.heads);
  const int channel = split * L::kChannels + 16 * w.warp;
  const Piece piece = a.pieces[index];
  if (piece.index == piece.count - 1) return;
  const int64_t of_document = (int64_t(piece.document) * a.heads + head) * D * D + int64_t(channel) * D;
  const int64_t of_piece = (index * a.heads + head) * D * D + int64_t(channel) * D;

  State<D> s = {};
  if (piece.index == 0) {
    if (a.initial_state != nullptr) w.load(s, a.initial_state + of_document);
  } else if (transition) {
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[c][e] = channel + w.g + e / 2 * 8 == 8 * c + 2 * w.t + e % 2 ? 1.0f : 0.0f;
      }
    }
  }
  const int64_t token = a.chunks[piece.first_chunk].token;
  const bool copy_only = transition && piece.index == 0;
  const Tiles<D, false> tiles{a,
                              w.shared,
                              piece.first_chunk * a.heads + head,
                              a.v + (token * a.heads + head) * D + split * L::kChannels,
                              copy_only ? 0 : piece.chunks,
                              transition ? 0 : tokens_of(a, piece, token)};
  scan_chunks<D, false, false>(a, w, tiles, token, head, channel, s);
  w.store(s, (transition ? a.transitions : a.ends) + of_piece);
}

// ends[j] += ends[j - 1] transitions[j] along the pieces of a document, eight value channels a block, a key channel a
// thread.
template <int D>
__global__ void __launch_bounds__(D) fold_kernel(const __grid_constant__ Arguments a) {
  constexpr int kValues = 8;
  __shared__ __align__(16) float state[D][kValues];  // S, key channels first
  const int part = static_cast<int>(blockIdx.x % (D / kValues)), column = static_cast<int>(threadIdx.x);
  const int64_t index = blockIdx.x / (D / kValues) / a.heads;
  const int head = static_cast<int>(blockIdx.x / (D / kValues) % a.heads);
  const Piece piece = a.pieces[index];
  if (piece.index != 0) return;
  const int64_t stride = int64_t(a.heads) * D * D, first = (index * a.heads + head) * D * D;
  float* ends = a.ends + first + part * kValues * D + column;
  const float* transitions = a.transitions + first + column;
  float s[kValues];
  for (int j = 0; j < piece.count - 1; ++j, ends += stride, transitions += stride) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (j > 0) state[column][v] = s[v];
      s[v] = ends[v * D];
    }
    if (j == 0) continue;
    __syncthreads();
#pragma unroll 16
    for (int r = 0; r < D; ++r) {
      const float m = transitions[r * D];
      const float4 low = reinterpret_cast<const float4*>(state[r])[0],
                   high = reinterpret_cast<const float4*>(state[r])[1];
      s[0] += m * low.x, s[1] += m * low.y, s[2] += m * low.z, s[3] += m * low.w;
      s[4] += m * high.x, s[5] += m * high.y, s[6] += m * high.z, s[7] += m * high.w;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kValues; ++v) ends[v * D] = s[v];
  }
}

template <int D>
void launch_scan(GpuStream stream, const Plan& plan, const Arguments& a) {
  using L = Layout<D>;
  const int64_t scans = plan.pieces * a.heads;
  if (plan.cut) {
    launch(piece_ends_kernel<D>, scans * 2 * L::kSplits, L::kThreads, L::kBytes, stream)(a);
    launch(fold_kernel<D>, scans * (D / 8), D, 0, stream)(a);
  }
  if (a.o != nullptr) {
    launch(scan_kernel<D, true, false>, scans * L::kSplits, L::kThreads, L::kBytes, stream)(a);
  } else {
    launch(scan_kernel<D, false, true>, scans * L::kSplits, L::kThreads, L::kBytes, stream)(a);
  }
}

template <class T>
T* data_of(const View& view) {
  return view.present() ? view.gpu<T>() : nullptr;
}

}  // namespace

void scan(GpuStream stream, const Dims& d, const Inputs& in, const Plan& plan, const Workspace& w,
          const ScanOutputs& out) {
  TESSERA_CHECK(out.o.present() != out.states.present() && out.states.present() == out.r.present(),
                "kda scan for {} o, {} states", out.o.present(), out.states.present());
  const Arguments a{.chunks = reinterpret_cast<const Chunk*>(w.chunks.gpu<int64_t>()),
                    .pieces = reinterpret_cast<const Piece*>(w.pieces.gpu<int64_t>()),
                    .heads = static_cast<int>(d.heads),
                    .v = in.v.gpu<bf16>(),
                    .k_start = halves(w.k_start),
                    .q_start = halves(w.q_start),
                    .k_end = halves(w.k_end),
                    .p = halves(w.p),
                    .inverse = halves(w.inverse),
                    .decay = w.decay.gpu<float>(),
                    .beta = w.beta.gpu<float>(),
                    .initial_state = data_of<float>(in.initial_state),
                    .ends = data_of<float>(w.ends),
                    .transitions = data_of<float>(w.transitions),
                    .final_state = data_of<float>(out.final_state),
                    .o = data_of<bf16>(out.o),
                    .states = data_of<bf16>(out.states),
                    .r = data_of<bf16>(out.r)};
  if (d.key_dim == 32) return launch_scan<32>(stream, plan, a);
  if (d.key_dim == 64) return launch_scan<64>(stream, plan, a);
  launch_scan<128>(stream, plan, a);
}

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Plan& plan,
             const Workspace& w) {
  prepare(stream, d, in, plan, w);
  scan(stream, d, in, plan, w, {.o = out.o, .final_state = out.final_state, .states = {}, .r = {}});
}

}  // namespace tessera::ops::kda::cuda
