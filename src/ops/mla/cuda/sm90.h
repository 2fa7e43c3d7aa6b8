// Attention on the tensor cores of sm_90, for heads of the large models' widths (has_sm90_kernels) in bf16; everything
// else goes to the portable kernels, which are the oracle too. Forward in sm90_forward.cu; backward in
// sm90_backward.cu, and what is done for a tile of queries before and after it in sm90_queries.cu.
#pragma once

#include "ops/mla/cuda/tiles.h"

namespace tessera::ops::mla::cuda::sm90 {

inline constexpr int kNope = 128, kRope = 64, kKey = kNope + kRope, kValue = 128;
inline constexpr int kGroup = 128;  // threads of a warp group

// Whether addresses and strides suit the copy engine, too.
bool takes(const Dims&, const Inputs&);
bool takes(const Dims&, const Inputs&, const OutputGrads&);

void forward(GpuStream, const Dims&, const Inputs&, const Arguments&);
// dq, dkv and each head's part of dk_shared.
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Arguments&, const BackwardWorkspace&);

// Of the backward, what is to be done beside the arguments.
inline constexpr int kHalfSums = kQueryTile * kKey / 2;  // of a tile of dQ: what a group of threads makes
struct Work {
  int64_t head_begin = 0, heads = 0;  // of this launch
  float scale_log2 = 0;               // scale log2(e)
  int64_t query_numbers = 0;          // tiles of queries in a head, idle ones too
  float* terms = nullptr;             // (H, query_numbers, 2, 64): lse log2(e), delta
  float* sums = nullptr;              // (heads, query_numbers, 2, kHalfSums): dQ / scale
  int* turns = nullptr;               // next block number, then (heads, query_numbers): blocks of keys that have added
};
void write_terms(GpuStream, const Arguments&, const Work&);  // of all heads
void round_sums(GpuStream, const Arguments&, const Work&);   // to dq, of the heads of a launch

}  // namespace tessera::ops::mla::cuda::sm90
