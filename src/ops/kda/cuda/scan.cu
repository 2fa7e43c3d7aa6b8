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
#include "ops/kda/cuda/scan.cuh"

namespace tessera::ops::kda::cuda {
namespace {

using namespace tessera::cuda;
using namespace chunk_scan;

struct Arguments {
  const Chunk* chunks;
  const Piece* pieces;
  int heads;
  const bf16* v;
  const half *k_start, *q_start, *k_end, *p, *inverse;
  const float *decay, *beta;
  const float* initial_state;  // of the first documents: all, one or none
  int64_t initial_states;
  float *ends, *transitions;     // null unless documents are cut or maps are wanted
  bool maps = false;             // `piece_ends` gives the map of every piece
  float* final_state = nullptr;  // of the documents from `final_from` on; what is not wanted is null, from here on
  int64_t final_from = 0;
  bf16 *o = nullptr, *states = nullptr, *r = nullptr;
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
  } else if (piece.document < a.initial_states) {
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
  if (a.final_state != nullptr && piece.index == piece.count - 1 && piece.document >= a.final_from) {
    w.store(s, a.final_state + of_document - a.final_from * a.heads * D * D);
  }
}

// Of the pieces of documents that are cut, but the last: `ends`, the state each leads to, the first from its true start
// and the others from 0; and `transitions`, the state each leads to from S^T = I without values. The first needs no
// transition; its place takes a copy of the initial state. For maps all pieces are alike: there is no true start.
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
  float* const to = transition ? a.transitions : a.ends;
  if (to == nullptr || (!a.maps && piece.index == piece.count - 1)) return;
  const bool true_start = !a.maps && piece.index == 0;
  const int64_t of_document = (int64_t(piece.document) * a.heads + head) * D * D + int64_t(channel) * D;
  const int64_t of_piece = (index * a.heads + head) * D * D + int64_t(channel) * D;

  State<D> s = {};
  if (true_start) {
    if (piece.document < a.initial_states) w.load(s, a.initial_state + of_document);
  } else if (transition) {
#pragma unroll
    for (int c = 0; c < D / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[c][e] = channel + w.g + e / 2 * 8 == 8 * c + 2 * w.t + e % 2 ? 1.0f : 0.0f;
      }
    }
  }
  const int64_t token = piece.chunks > 0 ? a.chunks[piece.first_chunk].token : 0;
  const bool copy_only = transition && true_start;
  const Tiles<D, false> tiles{a,
                              w.shared,
                              piece.first_chunk * a.heads + head,
                              a.v + (token * a.heads + head) * D + split * L::kChannels,
                              copy_only ? 0 : piece.chunks,
                              transition ? 0 : tokens_of(a, piece, token)};
  scan_chunks<D, false, false>(a, w, tiles, token, head, channel, s);
  w.store(s, to + of_piece);
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
void launch_piece_ends(GpuStream stream, const Plan& plan, const Arguments& a) {
  using L = Layout<D>;
  launch(piece_ends_kernel<D>, plan.pieces * a.heads * 2 * L::kSplits, L::kThreads, L::kBytes, stream)(a);
}

template <int D>
void launch_scan(GpuStream stream, const Plan& plan, const Arguments& a) {
  using L = Layout<D>;
  const int64_t scans = plan.pieces * a.heads;
  if (plan.cut) {
    launch_piece_ends<D>(stream, plan, a);
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

// Without the outputs.
Arguments arguments(const Dims& d, const Inputs& in, const Workspace& w) {
  return {.chunks = reinterpret_cast<const Chunk*>(w.chunks.gpu<int64_t>()),
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
          .initial_states = in.initial_state.present() ? in.initial_state.dim(0) : 0,
          .ends = data_of<float>(w.ends),
          .transitions = data_of<float>(w.transitions)};
}

}  // namespace

void scan(GpuStream stream, const Dims& d, const Inputs& in, const Plan& plan, const Workspace& w,
          const ScanOutputs& out) {
  TESSERA_CHECK(out.o.present() != out.states.present() && out.states.present() == out.r.present(),
                "kda scan for {} o, {} states", out.o.present(), out.states.present());
  Arguments a = arguments(d, in, w);
  a.final_state = data_of<float>(out.final_state);
  if (out.final_state.present()) a.final_from = in.documents.count() - out.final_state.dim(0);
  a.o = data_of<bf16>(out.o), a.states = data_of<bf16>(out.states), a.r = data_of<bf16>(out.r);
  if (d.key_dim == 32) return launch_scan<32>(stream, plan, a);
  if (d.key_dim == 64) return launch_scan<64>(stream, plan, a);
  launch_scan<128>(stream, plan, a);
}

void scan_maps(GpuStream stream, const Dims& d, const Inputs& in, const Plan& plan, const Workspace& w,
               const View& ends, const View& transitions) {
  Arguments a = arguments(d, in, w);
  a.maps = true;
  a.ends = data_of<float>(ends), a.transitions = data_of<float>(transitions);
  if (d.key_dim == 32) return launch_piece_ends<32>(stream, plan, a);
  if (d.key_dim == 64) return launch_piece_ends<64>(stream, plan, a);
  launch_piece_ends<128>(stream, plan, a);
}

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, const Plan& plan,
             const Workspace& w) {
  prepare(stream, d, in, plan, w);
  scan(stream, d, in, plan, w, {.o = out.o, .final_state = out.final_state, .states = {}, .r = {}});
}

}  // namespace tessera::ops::kda::cuda
