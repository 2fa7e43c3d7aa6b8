// The attention backward for heads of 128 + 64 / 128 on sm_90: backward_sm90.cu, and what is done for a tile of queries
// before and after it in backward_sm90_queries.cu.
#pragma once

#include "ops/mla/cuda/tiles.h"

namespace tessera::ops::mla::cuda::sm90 {

bool takes(const Dims&, const Inputs&, const OutputGrads&);

// dq, dkv and each head's part of dk_shared.
void backward(GpuStream, const Dims&, const Inputs&, const OutputGrads&, const Arguments&, const BackwardWorkspace&);

constexpr int kNope = 128, kRope = 64, kKey = kNope + kRope, kValue = 128;
constexpr int kQueries = kQueryTile, kGroup = 128;
constexpr int kHalfSums = kQueries * kKey / 2;  // of a tile: what a group of threads makes

// What is to be done beside the arguments.
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
