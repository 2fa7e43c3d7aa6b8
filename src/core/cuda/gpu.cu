#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

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

namespace gpu {

static int used_device = 0;

void use(int device) {
  used_device = device;
  TESSERA_CUDA(cudaSetDevice(device));
}

void require() {
  int count = 0, driver = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  TESSERA_CUDA(cudaDriverGetVersion(&driver));  // 0 without one
  if (driver == 0) {
    (void)cudaGetLastError();
    fail_user("device \"cuda\": there is no NVIDIA driver; install one for CUDA {} or newer, or set device = \"cpu\"",
              version_text(CUDART_VERSION));
  }
  if (found == cudaErrorInsufficientDriver || driver < CUDART_VERSION / 1000 * 1000) {
    (void)cudaGetLastError();
    fail_user(
        "device \"cuda\": the driver supports CUDA {}, wanted {}; install a newer driver, or set device = \"cpu\"",
        version_text(driver), version_text(CUDART_VERSION));
  }
  if (found != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    fail_user("device \"cuda\": no GPU found ({}); see `tessera doctor`, or set device = \"cpu\"",
              found == cudaSuccess ? "the driver lists none" : cudaGetErrorString(found));
  }
  const GpuInfo gpu = list_gpus().at(static_cast<size_t>(used_device));
  if (gpu.compute_major != 9 || gpu.compute_minor != 0) {
    fail_user(
        "device \"cuda\": {} has compute capability {}.{}, and the kernels are for 9.0 (Hopper); set device = \"cpu\"",
        gpu.name, gpu.compute_major, gpu.compute_minor);
  }
}

int64_t free_bytes() {
  size_t free = 0, all = 0;
  TESSERA_CUDA(cudaMemGetInfo(&free, &all));
  return static_cast<int64_t>(free);
}

GpuStream stream() {
  static const GpuStream made = [] {
    GpuStream s = nullptr;
    TESSERA_CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
  }();
  return made;
}

void wait() { TESSERA_CUDA(cudaStreamSynchronize(stream())); }
void wait_quietly() noexcept { (void)cudaStreamSynchronize(stream()); }

void* allocate(int64_t bytes) {
  require();
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    fail_user(
        "the run needs {:.2f} GiB of GPU memory and {:.2f} are free; set a smaller train.micro_tokens or "
        "train.recompute_all = true, or choose a smaller model",
        double(bytes) / double(1 << 30), double(free_bytes()) / double(1 << 30));
  }
  TESSERA_CUDA(error);
  return data;
}

void release(void* data) noexcept { (void)cudaFree(data); }

void fill_bytes(void* data, int byte, int64_t bytes) {
  if (bytes > 0) TESSERA_CUDA(cudaMemsetAsync(data, byte, static_cast<size_t>(bytes), stream()));
}

void copy(const void* from, Memory from_memory, void* to, Memory to_memory, const Rows& r) {
  const size_t bytes = static_cast<size_t>(r.bytes);
  if (r.count == 1) {
    TESSERA_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
  } else {
    TESSERA_CUDA(cudaMemcpy2DAsync(to, static_cast<size_t>(r.to_stride), from, static_cast<size_t>(r.from_stride),
                                   bytes, static_cast<size_t>(r.count), cudaMemcpyDefault, stream()));
  }
  if (from_memory == Memory::host || to_memory == Memory::host) wait();
}

void begin_range(const char* name) noexcept { nvtxRangePushA(name); }
void end_range() noexcept { nvtxRangePop(); }

}  // namespace gpu
}  // namespace tessera
