// The GPUs that this build can compute on. Two implementations, chosen by CMake: cuda/gpu.cu and gpu_none.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

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

}  // namespace tessera
