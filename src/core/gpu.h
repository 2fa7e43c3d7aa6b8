// The GPU of this process, without CUDA's headers. Two implementations, chosen by CMake: cuda/gpu.cu and gpu_none.cc.
//
// One process drives one GPU through one stream: work runs in the order it was asked for, and the host runs ahead until
// it copies something back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/view.h"

struct CUstream_st;

namespace tessera {

using GpuStream = CUstream_st*;  // cudaStream_t

struct GpuInfo {
  std::string name;
  int64_t memory_bytes = 0;
  int compute_major = 0, compute_minor = 0;  // compute capability, 9.0 on Hopper
  std::string driver;                        // newest CUDA version that the driver supports
};

// In the order of the CUDA runtime. Empty in a build without CUDA, and where there is no GPU or no driver.
std::vector<GpuInfo> list_gpus();

// "built without CUDA", or the CUDA version and the chips that kernels were compiled for.
std::string gpu_build();

namespace gpu {

// UserError where device = "cuda" cannot work here: a build without CUDA, no GPU, another architecture, an old driver.
void require();
void use(int device);  // from now on, by its place in list_gpus(); before anything else here. Without it: the first
int64_t free_bytes();  // of the GPU's memory, now

GpuStream stream();
void wait();                   // for everything asked for so far; throws its error
void wait_quietly() noexcept;  // the same where throwing is not possible; the error shows at the next call

void* allocate(int64_t bytes);  // UserError where the GPU has not that much left
void release(void*) noexcept;
void fill_bytes(void* data, int byte, int64_t bytes);
struct Rows {
  int64_t count, bytes;            // of one row
  int64_t from_stride, to_stride;  // bytes from row to row; not looked at for one row
};
// See tessera::copy() in view.h.
void copy(const void* from, Memory from_memory, void* to, Memory to_memory, const Rows&);

void begin_range(const char* name) noexcept;  // NVTX, for profilers
void end_range() noexcept;

}  // namespace gpu
}  // namespace tessera
