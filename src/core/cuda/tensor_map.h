// Tensor maps: what the copy engine of an sm_90 chip needs to know of a tensor to move boxes of it between global
// memory and 128-byte swizzled shared memory. Elements outside the tensor read as zero and are not written.
#pragma once

#include <cuda.h>

#include <initializer_list>

#include "core/cuda/check.h"
#include "core/view.h"

namespace tessera::cuda {

// From the driver that is loaded: nothing is linked with it, so that a binary starts without one, too.
inline auto encode_function() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    TESSERA_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
    TESSERA_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

// One index of a tensor, the fastest (whose step is one element) first.
struct MapIndex {
  int64_t extent, step;  // step in elements
  int64_t box;           // extent of a box; 128 bytes for the first index
};
inline CUtensorMap tensor_map(const void* data, DType dtype, std::initializer_list<MapIndex> indexes) {
  cuuint64_t extents[5] = {}, strides[5] = {};
  cuuint32_t boxes[5] = {}, steps[5] = {1, 1, 1, 1, 1};
  cuuint32_t rank = 0;
  for (const MapIndex& index : indexes) {
    extents[rank] = static_cast<cuuint64_t>(index.extent);
    strides[rank] = static_cast<cuuint64_t>(index.step * bytes_of(dtype));
    boxes[rank] = static_cast<cuuint32_t>(index.box);
    ++rank;
  }
  const bool half = dtype == DType::bf16;
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map, half ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rank, const_cast<void*>(data),
      extents, strides + 1, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TESSERA_CHECK(result == CUDA_SUCCESS, "no tensor map of {} with {} indexes: CUDA driver error {}", name_of(dtype),
                rank, static_cast<int>(result));
  return map;
}

// A contiguous tensor of rank 2 or 3, or one of rank 2 and any row stride; a box is `inner` elements of the last index
// by `outer` of the one before it.
inline CUtensorMap tensor_map(const View& v, int64_t inner, int64_t outer) {
  const MapIndex column{v.dim(v.rank() - 1), 1, inner};
  if (v.rank() == 2) return tensor_map(v.data(), v.dtype(), {column, {v.dim(0), v.row_stride(), outer}});
  TESSERA_CHECK(v.rank() == 3, "a tensor map of {}", v.shape().to_string());
  return tensor_map(v.data(), v.dtype(), {column, {v.dim(1), v.dim(2), outer}, {v.dim(0), v.row_stride(), 1}});
}

// The copy engine wants addresses and rows that are multiples of 16 bytes.
inline bool copy_engine_takes(const View& v) {
  const int64_t row_bytes = (v.rank() == 2 ? v.row_stride() : v.dim(v.rank() - 1)) * bytes_of(v.dtype());
  return row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(v.data()) % 16 == 0;
}

}  // namespace tessera::cuda
