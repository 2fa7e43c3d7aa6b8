// Kernels of dist on the GPU: cuda/rows.cu.
#pragma once

#include "core/context.h"

namespace tessera::dist::cuda {

// to (R, W) = rows `index[i]` of from (T, W); index (R) i64, on the GPU.
void gather_rows(GpuStream, const View& from, const View& index, const View& to);
// Rows `index[i]` of to (T, W) += from (R, W); no index twice. bf16 or f32.
void add_rows(GpuStream, const View& from, const View& index, const View& to);
void keep_own(GpuStream, int32_t begin, int32_t count, const View& indices);

}  // namespace tessera::dist::cuda
