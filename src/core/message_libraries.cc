// MPI and NCCL, asked for their versions. Loaded at run time, like the NVIDIA driver (nvml.cc): neither is needed.
#include <dlfcn.h>
#include <fmt/format.h>

#include <memory>

#include "core/machine.h"

namespace tessera {
namespace {

// What `ask` returns of the first of these libraries that is there.
template <class Ask>
MessageLibrary read(std::initializer_list<const char*> names, Ask&& ask) {
  const auto close = [](void* library) { dlclose(library); };
  for (const char* name : names) {
    const std::unique_ptr<void, decltype(close)> library(dlopen(name, RTLD_LAZY | RTLD_LOCAL), close);
    if (!library) continue;
    const std::string version = ask(library.get());
    return {name, version.empty() ? "version unknown" : version};
  }
  return {};
}

template <class Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

MessageLibrary read_mpi() {
  return read({"libmpi.so.40", "libmpi.so.12", "libmpi.so"}, [](void* library) {  // Open MPI, MPICH and kin, either
    char text[8192] = {};                                                         // as long as in any MPI
    int length = 0;
    const auto version = find<int(char*, int*)>(library, "MPI_Get_library_version");
    if (version == nullptr || version(text, &length) != 0) return std::string();
    const std::string all = text;
    return all.substr(0, all.find_first_of(",\n"));  // Open MPI adds who built it, where and when
  });
}

MessageLibrary read_nccl() {
  return read({"libnccl.so.2"}, [](void* library) {
    int number = 0;
    const auto version = find<int(int*)>(library, "ncclGetVersion");
    if (version == nullptr || version(&number) != 0) return std::string();
    return fmt::format("NCCL {}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  });
}

}  // namespace tessera
