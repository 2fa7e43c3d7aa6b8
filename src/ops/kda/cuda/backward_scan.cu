// The scan of KDA's backward (attention.md 5): the gradient of the state through the chunks of a piece, from the last.
//
//   dR  = P^T dO + Kh dS1        Y = M^T dR        dV = diag(beta) Y
//   dS0 = diag(e^{G_L}) dS1 + Qt^T dO - Kt^T diag(beta) Y
//
// All of it transposed: a warp owns 16 value channels and dS^T (16, K) is its accumulators from chunk to chunk; dO^T,
// dR^T and Y^T pass from product to product as fragments. Products are FP16 with f32 accumulators, as in the forward
// scan: each row of the left operand is scaled by a power of two (Scale), which FP16's 10 bits then hold as well as
// TF32 would. A scale is taken from gradients of the chunk and of those behind it: what has none leaves no bit.
//
// The warps of a block share the tiles of a chunk in shared memory, one buffer a tile: each of the five steps below
// begins with a barrier, after which the tile of the step before it is fetched for the next chunk, four steps ahead of
// its use.
//
//   0: Kh    1: P, dO    2: M, beta    3: Qt, e^{G_L}    4: Kt
//
// A cut document (cuda.h: Piece) is gone through twice: `scan` without outputs finds, for its pieces at once, what dS
// becomes over them, the last from the true end and the others from 0; `fold` chains them, dS = T^T dS + dSx, with the
// transitions T that the forward scan left; then every piece starts from its true end. So a document differs from one
// in one go only where a gradient passes two cuts. Bytes a chunk and head at K = V = 128: 96 KB read, 64 KB written.
#include "ops/kda/cuda/backward_operand.cuh"
#include "ops/kda/cuda_backward.h"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;
using namespace backward_scan;

constexpr int kSteps = 5;

struct Arguments {
  int64_t heads;
  const Chunk* chunks;
  const Piece* pieces;
  const half *k_start, *q_start, *k_end, *p, *inverse;
  const float *decay, *beta;
  const bf16* d_o;
  const float* d_final = nullptr;  // of the documents from `final_from` on; null: zeros
  int64_t final_from = 0;
  float* ends = nullptr;  // of each piece of a cut document: where dS leads to over it, then dS at its end
  const float* transitions = nullptr;
  bf16 *d_states = nullptr, *y = nullptr, *dv = nullptr;
  float* d_initial = nullptr;  // of the first documents: all, one or none
  int64_t initial_states = 0;
  bool maps = false;  // without outputs: where dS leads to over every piece, from 0

  __device__ bool has_final(const Piece& piece) const { return d_final != nullptr && piece.document >= final_from; }
};

template <int D, int kWarps>
struct alignas(16) Shared {
  uint4 p[kChunk * kChunk / 8], inverse[kChunk * kChunk / 8];
  uint4 k_end[kChunk * D / 8], q_start[kChunk * D / 8], k_start[kChunk * D / 8];
  uint4 d_o[kChunk * 2 * kWarps];
  float decay[D], beta[kChunk];
};

// A block's share of the work and of a chunk's operands.
template <int D, int kWarps>
struct Block {
  static constexpr int kThreads = 32 * kWarps, kSplits = D / (16 * kWarps);

  __device__ Block(const Arguments& arguments, Shared<D, kWarps>& shared)
      : a(arguments),
        s(shared),
        head(blockIdx.x / kSplits % a.heads),
        piece_index(blockIdx.x / kSplits / a.heads),
        piece(a.pieces[piece_index]),
        first_value(int(blockIdx.x % kSplits) * 16 * kWarps) {}

  __device__ int64_t place(int64_t chunk) const { return chunk * a.heads + head; }
  __device__ int64_t warp_value() const { return first_value + 16 * warp; }

  // Asks for the tiles of a step.
  template <int kStep>
  __device__ void fetch(int64_t chunk) {
    const int64_t at = place(chunk), of_rows = at * kChunk * D, of_scores = at * kChunk * kChunk;
    if constexpr (kStep == 0) {
      copy_tile_async<kChunk, D / 8, kThreads>(shared_address(s.k_end), a.k_end + of_rows);
    } else if constexpr (kStep == 1) {
      copy_tile_async<kChunk, kChunk / 8, kThreads>(shared_address(s.p), a.p + of_scores);
      const Chunk c = a.chunks[chunk];
#pragma unroll
      for (int i = 0; i < kChunk * 2 * kWarps / kThreads; ++i) {
        const int u = i * kThreads + int(threadIdx.x), row = u / (2 * kWarps), unit = u % (2 * kWarps);
        const bool valid = row < c.rows;
        copy_async(unit_address<2 * kWarps>(shared_address(s.d_o), row, unit),
                   a.d_o + ((c.token + (valid ? row : 0)) * a.heads + head) * D + first_value + 8 * unit, valid);
      }
    } else if constexpr (kStep == 2) {
      copy_tile_async<kChunk, kChunk / 8, kThreads>(shared_address(s.inverse), a.inverse + of_scores);
      fetch_floats<kChunk>(s.beta, a.beta + at * kChunk);
    } else if constexpr (kStep == 3) {
      copy_tile_async<kChunk, D / 8, kThreads>(shared_address(s.q_start), a.q_start + of_rows);
      fetch_floats<D>(s.decay, a.decay + at * D);
    } else {
      copy_tile_async<kChunk, D / 8, kThreads>(shared_address(s.k_start), a.k_start + of_rows);
    }
  }
  template <int kCount>
  __device__ void fetch_floats(float* to, const float* from) {
    if (threadIdx.x < kCount / 4) copy_async(shared_address(to + 4 * threadIdx.x), from + 4 * threadIdx.x);
  }
  // Waits for the tiles of a step of `chunk` and asks for those of the step before, which everyone is done with.
  template <int kStep>
  __device__ void begin_step(int64_t chunk) {
    wait_copies<kSteps - 2>();
    __syncthreads();
    const int64_t next = kStep == 0 ? chunk : chunk - 1;
    if (next >= piece.first_chunk) fetch<(kStep + kSteps - 1) % kSteps>(next);
    commit_copies();
  }

  const Arguments& a;
  Shared<D, kWarps>& s;
  const int64_t head, piece_index;
  const Piece piece;
  const int first_value;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
};

template <int D, int kWarps, bool kOutputs>
__global__ void __launch_bounds__(32 * kWarps) scan_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 memory[];
  Shared<D, kWarps>& s = *reinterpret_cast<Shared<D, kWarps>*>(memory);
  Block<D, kWarps> b(a, s);
  const int g = b.g, t = b.t, lane = b.lane;
  const bool cut = b.piece.count > 1;
  if (!kOutputs && !a.maps && (!cut || b.piece.index == 0)) return;  // nothing is asked of what lies before the first
  const int64_t of_document = ((b.piece.document * a.heads + b.head) * D + b.warp_value()) * D;
  const int64_t of_piece = ((b.piece_index * a.heads + b.head) * D + b.warp_value()) * D;
  Tiles<D / 8> ds = {};
  if (kOutputs && cut) {
    load_state<D>(a.ends + of_piece, g, t, ds);
  } else if (b.piece.index == b.piece.count - 1 && a.has_final(b.piece)) {
    load_state<D>(a.d_final + of_document - a.final_from * a.heads * D * D, g, t, ds);
  }
  const int64_t last = b.piece.first_chunk + b.piece.chunks - 1;
  if (b.piece.chunks > 0) {
    b.template fetch<0>(last), commit_copies();
    b.template fetch<1>(last), commit_copies();
    b.template fetch<2>(last), commit_copies();
    b.template fetch<3>(last), commit_copies();
  }
#pragma unroll 1
  for (int64_t chunk = last; chunk >= b.piece.first_chunk; --chunk) {
    const Chunk c = a.chunks[chunk];
    const int64_t at = b.place(chunk);
    Tiles<kChunk / 8> dr = {}, y = {};
    b.template begin_step<0>(chunk);
    if (kOutputs) store_rounded<D>(a.d_states + (at * D + b.warp_value()) * D, g, t, ds);
    const RowScales of_ds = multiply_state<D>(dr, ds, s.k_end, lane);
    b.template begin_step<1>(chunk);
    const auto d_o = Operand<kChunk / 8>::template load<2 * kWarps>(s.d_o, b.warp, lane);
    scale_rows<kChunk / 8>(dr, of_ds.down[0] * d_o.scales.up[0], of_ds.down[1] * d_o.scales.up[1]);
    multiply_lower(dr, d_o, s.p, lane);
    b.template begin_step<2>(chunk);
    const Operand<kChunk / 8> of_dr(dr);
    multiply_lower(y, of_dr, s.inverse, lane);
    scale_rows<kChunk / 8>(y, of_dr.scales.down[0] * d_o.scales.down[0], of_dr.scales.down[1] * d_o.scales.down[1]);
    if (kOutputs) store_transposed(a.y + at * kChunk * D + b.warp_value(), D, kChunk, g, t, y);
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[n][i] *= s.beta[8 * n + 2 * t + i % 2];
    }
    if (kOutputs) {
      store_transposed(a.dv + (c.token * a.heads + b.head) * D + b.warp_value(), a.heads * D, c.rows, g, t, y);
    }
    const Operand<kChunk / 8> of_y(y);
    b.template begin_step<3>(chunk);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[n][i] *= s.decay[8 * n + 2 * t + i % 2] * d_o.scales.up[i / 2];
    }
    multiply_rows<D>(ds, d_o, s.q_start, lane);
    b.template begin_step<4>(chunk);
    // Minus Y: both signs of the state change instead.
    scale_rows<D / 8>(ds, -d_o.scales.down[0] * of_y.scales.up[0], -d_o.scales.down[1] * of_y.scales.up[1]);
    multiply_rows<D>(ds, of_y, s.k_start, lane);
    scale_rows<D / 8>(ds, -of_y.scales.down[0], -of_y.scales.down[1]);
  }
  if (!kOutputs) store_state<D>(a.ends + of_piece, g, t, ds);
  if (kOutputs && b.piece.document < a.initial_states && b.piece.index == 0) {
    store_state<D>(a.d_initial + of_document, g, t, ds);
  }
}

// dS at the end of each piece of a cut document, in the place of where it leads to: dS <- dS T^T + dSx in f32, rows of
// dS V-first. A block has eight value channels of a head, a thread a key channel; T by cp.async, one piece ahead.
constexpr int kFoldValues = 8;

template <int D>
struct FoldShared {
  static constexpr int kPitch = D + 4;  // floats: eight threads read 16 bytes of their rows without conflicts
  float transition[2][D * kPitch];
  float ds[D][kFoldValues];
};

template <int D>
__device__ void fetch_transition(const float* from, float* to) {
#pragma unroll 4
  for (int i = 0; i < D / 4; ++i) {
    const int u = i * D + int(threadIdx.x), row = u / (D / 4), unit = u % (D / 4);
    copy_async(shared_address(to + row * FoldShared<D>::kPitch + 4 * unit), from + 4 * u);
  }
}

template <int D>
__global__ void __launch_bounds__(D) fold_kernel(const __grid_constant__ Arguments a) {
  constexpr int kSplits = D / kFoldValues;
  extern __shared__ uint4 memory[];
  FoldShared<D>& s = *reinterpret_cast<FoldShared<D>*>(memory);
  const int64_t split = blockIdx.x % kSplits, head = blockIdx.x / kSplits % a.heads;
  const int64_t first = blockIdx.x / kSplits / a.heads;
  const Piece piece = a.pieces[first];
  if (piece.count == 1 || piece.index > 0) return;
  const int channel = int(threadIdx.x), last = piece.count - 1;
  const int64_t stride = a.heads * D * D, of_head = (first * a.heads + head) * D * D;
  const int64_t of_values = split * kFoldValues * D + channel;
  const auto fetch = [&](int j) {
    if (j > 0) fetch_transition<D>(a.transitions + of_head + j * stride, s.transition[j % 2]);
    commit_copies();
  };
  fetch(last - 1);
  float ds[kFoldValues];  // at the end of piece j
#pragma unroll
  for (int v = 0; v < kFoldValues; ++v) {
    const int64_t from = ((piece.document - a.final_from) * a.heads + head) * D * D + of_values + v * D;
    ds[v] = a.has_final(piece) ? a.d_final[from] : 0.0f;
  }
#pragma unroll 1
  for (int j = last; j >= 0; --j) {
    float* end = a.ends + of_head + j * stride + of_values;
    float over[kFoldValues] = {};
#pragma unroll
    for (int v = 0; v < kFoldValues; ++v) {
      if (j > 0) over[v] = end[v * D];
      end[v * D] = ds[v];
      s.ds[channel][v] = ds[v];
    }
    if (j > 0 && j < last) {
      wait_copies<0>();
      __syncthreads();
      fetch(j - 1);
      const float4* row = reinterpret_cast<const float4*>(s.transition[j % 2] + channel * FoldShared<D>::kPitch);
#pragma unroll 4
      for (int c = 0; c < D / 4; ++c) {
        const float4 x = row[c];
#pragma unroll
        for (int v = 0; v < kFoldValues; ++v) {
          over[v] +=
              x.x * s.ds[4 * c][v] + x.y * s.ds[4 * c + 1][v] + x.z * s.ds[4 * c + 2][v] + x.w * s.ds[4 * c + 3][v];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int v = 0; v < kFoldValues; ++v) ds[v] = over[v];
  }
}

template <int D, int kWarps>
int64_t scan_blocks(const Plan& plan, const Arguments& a) {
  return plan.pieces * a.heads * (D / (16 * kWarps));
}

// Calls f<D, kWarps>(). Eight warps share the most; four where that would leave most of the GPU idle.
template <class F>
void choose_warps(const Dims& d, const Plan& plan, F&& f) {
  if (d.key_dim == 32) return f.template operator()<32, 2>();
  if (d.key_dim == 64) return f.template operator()<64, 4>();
  if (plan.pieces * d.value_heads < 64) return f.template operator()<128, 4>();
  f.template operator()<128, 8>();
}

template <int D, int kWarps>
void launch_scan(GpuStream stream, const Plan& plan, const Arguments& a) {
  constexpr int kThreads = 32 * kWarps;
  const int64_t grid = scan_blocks<D, kWarps>(plan, a), bytes = sizeof(Shared<D, kWarps>);
  if (plan.cut) {
    launch(scan_kernel<D, kWarps, false>, grid, kThreads, bytes, stream)(a);
    launch(fold_kernel<D>, plan.pieces * a.heads * (D / kFoldValues), D, sizeof(FoldShared<D>), stream)(a);
  }
  launch(scan_kernel<D, kWarps, true>, grid, kThreads, bytes, stream)(a);
}

// What the scan of every pass reads.
Arguments arguments(const Dims& d, const View& d_o, const Workspace& w) {
  return {.heads = d.value_heads,
          .chunks = reinterpret_cast<const Chunk*>(w.chunks.gpu<int64_t>()),
          .pieces = reinterpret_cast<const Piece*>(w.pieces.gpu<int64_t>()),
          .k_start = halves(w.k_start),
          .q_start = halves(w.q_start),
          .k_end = halves(w.k_end),
          .p = halves(w.p),
          .inverse = halves(w.inverse),
          .decay = w.decay.gpu<float>(),
          .beta = w.beta.gpu<float>(),
          .d_o = d_o.gpu<bf16>()};
}

}  // namespace

void reverse_scan(GpuStream stream, const Dims& d, const Documents& documents, const OutputGrads& dout,
                  const Grads& grads, const Plan& plan, const Workspace& w, const BackwardWorkspace& b) {
  Arguments a = arguments(d, dout.o, w);
  if (dout.final_state.present()) {
    a.d_final = dout.final_state.gpu<float>();
    a.final_from = documents.count() - dout.final_state.dim(0);
  }
  if (plan.cut) a.ends = w.ends.gpu<float>(), a.transitions = w.transitions.gpu<float>();
  a.d_states = b.d_states.gpu<bf16>(), a.y = b.y.gpu<bf16>(), a.dv = grads.v.gpu<bf16>();
  if (grads.initial_state.present()) {
    a.d_initial = grads.initial_state.gpu<float>();
    a.initial_states = grads.initial_state.dim(0);
  }
  choose_warps(d, plan, [&]<int D, int kWarps>() { launch_scan<D, kWarps>(stream, plan, a); });
}

void reverse_scan_maps(GpuStream stream, const Dims& d, const View& d_o, const Plan& plan, const Workspace& w,
                       const View& ends) {
  Arguments a = arguments(d, d_o, w);
  a.maps = true;
  a.ends = ends.gpu<float>();
  choose_warps(d, plan, [&]<int D, int kWarps>() {
    launch(scan_kernel<D, kWarps, false>, scan_blocks<D, kWarps>(plan, a), 32 * kWarps, sizeof(Shared<D, kWarps>),
           stream)(a);
  });
}

}  // namespace tessera::ops::kda::cuda
