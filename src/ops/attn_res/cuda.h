#pragma once

#include <algorithm>

#include "ops/attn_res/op.h"

namespace tessera::ops::attn_res::cuda {

inline constexpr int64_t kMaxWidth = 8192;   // a token lies in the registers of one block
inline constexpr int64_t kMaxSources = 192;  // their pointers are arguments of a kernel, 4 KiB in all

// Blocks of the backward, each with its own sum of query and gain gradients: some 640 threads a multiprocessor.
inline int64_t partial_count(const Dims& d) {
  const int64_t warps_of_token = std::max<int64_t>(1, (d.width + 255) / 256);
  return 132 * std::clamp<int64_t>(20 / warps_of_token, 1, 16);
}

void forward(GpuStream, const Dims&, const Inputs&, const Outputs&, Saved*);
void backward(GpuStream, const Dims&, const Inputs&, const Saved&, const OutputGrads&, const Grads&,
              const View& partials);  // (partial_count, D) f32

}  // namespace tessera::ops::attn_res::cuda
