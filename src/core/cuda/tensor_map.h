// Tensor maps: what the copy engine of an sm_90 chip needs to know of a tensor to move boxes of it between global
// memory and 128-byte swizzled shared memory. Elements outside the tensor read as zero and are not written.
#pragma once

#include <cuda.h>

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

// The copy engine wants addresses and rows that are multiples of 16 bytes.
inline bool copy_engine_takes(const View& v) {
  const int64_t row_bytes = (v.rank() == 2 ? v.row_stride() : v.dim(v.rank() - 1)) * bytes_of(v.dtype());
  return row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(v.data()) % 16 == 0;
}

// A tensor of rank 2, of any row stride, or a contiguous one of rank 3. A box is `inner` elements of the last index
// (128 bytes) by `outer` of the one before it.
inline CUtensorMap tensor_map(const View& v, int64_t inner, int64_t outer) {
  const bool half = v.dtype() == DType::bf16;
  const auto rank = static_cast<cuuint32_t>(v.rank());
  const int64_t row = v.rank() == 2 ? v.row_stride() : v.dim(v.rank() - 1);
  cuuint64_t extents[3] = {}, strides[2] = {};  // fastest index first; strides in bytes, without the fastest
  for (int i = 0; i < v.rank(); ++i) extents[i] = static_cast<cuuint64_t>(v.dim(v.rank() - 1 - i));
  strides[0] = static_cast<cuuint64_t>(row * bytes_of(v.dtype()));
  strides[1] = extents[1] * strides[0];
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(inner), static_cast<cuuint32_t>(outer), 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode_function()(&map, half ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rank, v.data(),
                        extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TESSERA_CHECK(result == CUDA_SUCCESS, "no tensor map of {} {}: CUDA driver error {}", name_of(v.dtype()),
                v.shape().to_string(), static_cast<int>(result));
  return map;
}

}  // namespace tessera::cuda
