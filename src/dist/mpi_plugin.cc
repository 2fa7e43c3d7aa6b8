#include "dist/mpi_plugin.h"

#include <dlfcn.h>

#include <filesystem>

namespace tessera::dist {

MpiPlugin find_mpi_plugin() {
  std::error_code no_proc;
  const auto binary = std::filesystem::read_symlink("/proc/self/exe", no_proc);
  MpiPlugin plugin{.path = (binary.parent_path() / "libtessera_mpi.so").string(), .problem = ""};
  if (!std::filesystem::exists(plugin.path)) {
    plugin.problem = fmt::format(
        "there is no {}: this tessera was built without MPI, or moved without that file; run scripts/setup (it "
        "installs libopenmpi-dev and openmpi-bin) and build again",
        plugin.path);
    return plugin;
  }
  // Global: the parts of Open MPI are libraries of their own, which look for each other's symbols. Never closed: MPI's
  // threads and handlers at exit live in it.
  void* library = dlopen(plugin.path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    plugin.problem = fmt::format(
        "the MPI that this tessera was built with is not on this machine ({}); install it (Debian: openmpi-bin and "
        "libopenmpi-dev), or build tessera again with the MPI that is",
        dlerror());
    return plugin;
  }
  const auto* functions = static_cast<const mpi::Plugin*>(dlsym(library, "tessera_mpi_plugin"));
  if (functions == nullptr || functions->interface != mpi::kInterface) {
    plugin.problem = fmt::format("{} belongs to another build of tessera; build again", plugin.path);
    return plugin;
  }
  plugin.functions = functions;
  return plugin;
}

std::unique_ptr<Transport> join_by_mpi(const Launcher& launcher, const JobOptions& options, Share& share) {
  const MpiPlugin plugin = find_mpi_plugin();
  if (!plugin.problem.empty()) fail_user("{} started several processes, and {}", launcher.name, plugin.problem);
  std::unique_ptr<Transport> transport = plugin.functions->join(options, share);
  if (launcher.processes > 0 && transport->size() != launcher.processes) {
    fail_user(
        "{} started {} processes, and {}, which this tessera was built with, knows of {}; start it with the mpirun of "
        "that MPI, or build tessera again with the MPI in use",
        launcher.name, launcher.processes, plugin.functions->built_with, transport->size());
  }
  return transport;
}

}  // namespace tessera::dist
