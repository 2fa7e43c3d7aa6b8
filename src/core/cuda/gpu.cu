#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/gpu.h"

namespace tessera {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::vector<GpuInfo> list_gpus() {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  // A machine without a GPU, without a driver, or with a driver older than this build is an ordinary one: no GPUs.
  if (found == cudaErrorNoDevice || found == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    return {};
  }
  TESSERA_CUDA(found);
  int driver = 0;
  TESSERA_CUDA(cudaDriverGetVersion(&driver));
  std::vector<GpuInfo> gpus;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    TESSERA_CUDA(cudaGetDeviceProperties(&properties, device));
    gpus.push_back({.name = properties.name,
                    .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
                    .compute_major = properties.major,
                    .compute_minor = properties.minor,
                    .driver = version_text(driver)});
  }
  return gpus;
}

std::string gpu_build() { return "CUDA " + version_text(CUDART_VERSION) + ", kernels for sm_90a"; }

}  // namespace tessera
