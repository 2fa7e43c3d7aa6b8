// Tensor maps of the products' operands.
#pragma once

#include "core/cuda/tensor_map.h"
#include "core/view.h"

namespace tessera::ops::experts::cuda::sm90 {

// A contiguous tensor of rank 2 or 3. A box is `inner` elements of the last index (128 bytes) by `outer` of the one
// before it.
inline CUtensorMap tensor_map(const View& v, int64_t inner, int64_t outer) {
  using tessera::cuda::MapIndex;
  const int last = v.rank() - 1;
  const int64_t width = v.dim(last), rows = v.dim(last - 1);
  const MapIndex columns{width, 1, inner}, among{rows, width, outer};
  if (v.rank() == 2) return tessera::cuda::tensor_map(v.data(), v.dtype(), {columns, among});
  return tessera::cuda::tensor_map(v.data(), v.dtype(), {columns, among, {v.dim(0), rows * width, 1}});
}

}  // namespace tessera::ops::experts::cuda::sm90
