#include "core/gpu.h"

namespace tessera {

std::vector<GpuInfo> list_gpus() { return {}; }

std::string gpu_build() { return "built without CUDA"; }

}  // namespace tessera
