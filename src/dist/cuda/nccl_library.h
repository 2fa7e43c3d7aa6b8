// NCCL, loaded at run time so that a build for GPUs runs on one of them without it. Its header gives the types.
#pragma once

#include <dlfcn.h>
#include <nccl.h>

#include <string>

#include "core/error.h"

namespace tessera::dist {

struct Nccl {
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommFinalize) finalize;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGetLastError) last_error;
};

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) fail_user("libnccl.so.2 has no {}; install NCCL 2.18 or newer", name);
}

inline Nccl load_nccl() {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail_user(
        "several GPUs need NCCL, and it was not found ({}); install libnccl2 of NVIDIA's repository, or the wheel "
        "nvidia-nccl-cu13 with its lib folder in LD_LIBRARY_PATH",
        dlerror());
  }
  Nccl n{};
  load(library, "ncclGetUniqueId", n.get_unique_id);
  load(library, "ncclCommInitRankConfig", n.init);
  load(library, "ncclCommFinalize", n.finalize);
  load(library, "ncclCommDestroy", n.destroy);
  load(library, "ncclCommAbort", n.abort);
  load(library, "ncclCommGetAsyncError", n.async_error);
  load(library, "ncclGroupStart", n.group_start);
  load(library, "ncclGroupEnd", n.group_end);
  load(library, "ncclSend", n.send);
  load(library, "ncclRecv", n.receive);
  load(library, "ncclGetErrorString", n.error_string);
  load(library, "ncclGetLastError", n.last_error);
  return n;
}

inline const Nccl& nccl() {
  static const Nccl loaded = load_nccl();
  return loaded;
}

// Calls of a communicator that does not block may answer that they are under way.
inline bool failed(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }
inline std::string error_text(ncclResult_t result) {
  return fmt::format("{} ({})", nccl().error_string(result), nccl().last_error(nullptr));
}
inline void check_nccl(ncclResult_t result, const char* call, const char* file, int line) {
  if (failed(result)) throw Error(fmt::format("{}:{}: {}: {}", file, line, call, error_text(result)));
}

}  // namespace tessera::dist

#define TESSERA_NCCL(call) ::tessera::dist::check_nccl((call), #call, __FILE__, __LINE__)
