// The NVIDIA driver, asked through its management library. Loaded at run time, so that one binary runs with and without
// it; the few entry points used are declared here instead of needing the library's header to build.
#include <dlfcn.h>

#include <array>
#include <memory>

#include "core/machine.h"

namespace tessera {
namespace {

using NvmlDevice = void*;
struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};
constexpr int kNvmlSuccess = 0;

template <class Function>
bool load(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

struct Nvml {
  int (*init)();
  int (*shutdown)();
  int (*driver_version)(char*, unsigned);
  int (*count)(unsigned*);
  int (*handle)(unsigned, NvmlDevice*);
  int (*name)(NvmlDevice, char*, unsigned);
  int (*memory)(NvmlDevice, NvmlMemory*);

  bool load_from(void* library) {
    return load(library, "nvmlInit_v2", init) && load(library, "nvmlShutdown", shutdown) &&
           load(library, "nvmlSystemGetDriverVersion", driver_version) &&
           load(library, "nvmlDeviceGetCount_v2", count) && load(library, "nvmlDeviceGetHandleByIndex_v2", handle) &&
           load(library, "nvmlDeviceGetName", name) && load(library, "nvmlDeviceGetMemoryInfo", memory);
  }
};

void read_gpus(const Nvml& nvml, NvidiaDriver& driver) {
  std::array<char, 96> text{};
  if (nvml.driver_version(text.data(), text.size()) == kNvmlSuccess) driver.version = text.data();
  unsigned count = 0;
  if (nvml.count(&count) != kNvmlSuccess) return;
  for (unsigned i = 0; i < count; ++i) {
    NvmlDevice device = nullptr;
    if (nvml.handle(i, &device) != kNvmlSuccess) continue;
    NvidiaDriver::Gpu gpu;
    if (nvml.name(device, text.data(), text.size()) == kNvmlSuccess) gpu.name = text.data();
    NvmlMemory memory{};
    if (nvml.memory(device, &memory) == kNvmlSuccess) gpu.memory_bytes = static_cast<int64_t>(memory.total);
    driver.gpus.push_back(gpu);
  }
}

}  // namespace

NvidiaDriver read_nvidia_driver(const char* library_name) {
  NvidiaDriver driver;
  const auto close = [](void* library) { dlclose(library); };
  const std::unique_ptr<void, decltype(close)> library(dlopen(library_name, RTLD_LAZY | RTLD_LOCAL), close);
  Nvml nvml{};
  if (!library || !nvml.load_from(library.get()) || nvml.init() != kNvmlSuccess) return driver;
  driver.found = true;
  read_gpus(nvml, driver);
  nvml.shutdown();
  return driver;
}

}  // namespace tessera
