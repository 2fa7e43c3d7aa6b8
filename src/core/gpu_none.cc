#include "core/gpu.h"

namespace tessera {

std::vector<GpuInfo> list_gpus() { return {}; }

std::string gpu_build() { return "built without CUDA"; }

namespace gpu {

void require() {
  fail_user(
      "device \"cuda\" is wanted and this tessera was built without CUDA; build it with `make cuda`, or set "
      "device = \"cpu\"");
}

// Nothing lies on a GPU here: allocate() is the only way there, and it refuses.
void use(int) {}
int64_t free_bytes() { return 0; }
GpuStream stream() { return nullptr; }
void wait() {}
void wait_quietly() noexcept {}
void* allocate(int64_t) {
  require();
  return nullptr;
}
void release(void*) noexcept {}
void fill_bytes(void*, int, int64_t) {}
void copy(const void*, Memory, void*, Memory, const Rows&) {}
void begin_range(const char*) noexcept {}
void end_range() noexcept {}

}  // namespace gpu
}  // namespace tessera
