// KDA on the GPU: what its kernels hand on to each other, and their launchers.
//
//   prepare   (chunks x H)                  gates, decayed operands, P and M of every chunk: no chunk waits for another
//   scan      (pieces x H x value columns)  the state through the chunks of a piece; O, or what the backward needs
//   step      (N x H)                       decode
//   maps      (pieces x H x value columns)  what a document does to any state, from scans without outputs
//
// Chunks are 64 tokens whatever Dims::chunk says. Heads are square, K = V = 32, 64 or 128, and HV = H. Activations are
// bf16; operands that pass from `prepare` to the others are FP16: they are at most about 1, and rounding them to 10
// bits costs what TF32 would. Nothing is saved for the backward, which runs `prepare` and `scan` again.
#pragma once

#include <cmath>

#include "ops/kda/op.h"

namespace tessera::ops::kda::cuda {

inline constexpr int64_t kChunk = 64;

inline float query_scale(const Dims& d) {
  return static_cast<float>(d.scale != 0 ? d.scale : 1 / std::sqrt(static_cast<double>(d.key_dim)));
}

struct Chunk {
  int64_t token;  // the first one, in the pack
  int32_t document, rows;
};
// What one scan goes through: a document, or a segment of it. A document is cut only where the heads alone would leave
// most of the GPU idle and it has more than two segments; a segment is `kSegment` chunks from the document's start, so
// that no cut depends on the document's end.
struct Piece {
  int64_t first_chunk;  // in the list of all chunks
  int32_t chunks;       // 0: an empty document
  int32_t document;
  int32_t index, count;  // which of how many pieces of its document
};
inline constexpr int64_t kSegment = 128;

// Sizes of grids and workspaces: a function of the dims and the offsets alone, so that dry runs agree.
struct Plan {
  int64_t chunks, pieces;
  int64_t segment;  // chunks a segment; 0: documents are not cut, whatever their length
  bool cut;         // some document is
};
Plan plan(const Dims&, const Documents&);

// With C = kChunk, M chunks and rows past the end of a document as if k = q = v = 0, g = 0 and beta = 0:
struct Workspace {
  View chunks;       // (M, 2) i64: Chunk
  View pieces;       // (pieces, 3) i64: Piece
  View k_start;      // (M, H, C, K) FP16: k o e^G                        Kt of attention.md 3.2
  View q_start;      // (M, H, C, K) FP16: scale q o e^G                  Qt
  View k_end;        // (M, H, C, K) FP16: k o e^{G_L - G}                Kh
  View p, inverse;   // (M, H, C, C) FP16: P and M = (I + A)^{-1}, zeros above the diagonal
  View decay;        // (M, H, K) f32: e^{G_L}
  View beta;         // (M, H, C) f32
  View ends;         // (pieces, H, V, K) f32: the state each piece ends with; absent unless documents are cut
  View transitions;  // (pieces, H, K, K) f32, (row r, column c): what channel c of the end has of r of the start
};
int64_t workspace_bytes(const Dims&, const Plan&);
Workspace allocate_workspace(Arena&, const Dims&, const Plan&);

void fill_lists(GpuStream, const Documents&, const Plan&, const Workspace&);
// Fills the lists, and all that a chunk has by itself: everything but `ends` and `transitions`.
void prepare(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&);

// Outputs of a scan; what is absent is not computed. The backward asks for `states` and `r`, the forward for the
// others.
struct ScanOutputs {
  View o;            // (T, H, V) bf16
  View final_state;  // (N, H, V, K) f32; may be the memory of the initial state
  View states;       // (M, H, V, K) bf16: the state each chunk begins from
  View r;            // (M, H, C, V) bf16: R of attention.md 3.2
};
void scan(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&, const ScanOutputs&);

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, const Plan&, const Workspace&);

// Maps of states (op.h). Documents are the one whose map it is, its tokens counted as in the pack.
void state_map(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&, const StateMap&);
void state_gradient_map(GpuStream, const Dims&, const Inputs&, const View& d_o, const Plan&, const Workspace&,
                        const View& offset);
// Their scans, of every piece by itself: (pieces, H, D, D) f32, absent: not wanted. After `prepare`.
void scan_maps(GpuStream, const Dims&, const Inputs&, const Plan&, const Workspace&, const View& ends,
               const View& transitions);
void reverse_scan_maps(GpuStream, const Dims&, const View& d_o, const Plan&, const Workspace&, const View& ends);
void check_fold(const View& state);  // the widths that it has kernels for
void fold(GpuStream, const StateMap&, Pass, const View& state);

void step(GpuStream, const Dims&, const Inputs&, const View& state, const View& o);

}  // namespace tessera::ops::kda::cuda
