// Finds libtessera_mpi.so, which alone knows MPI: beside the binary, loaded at run time.
#pragma once

#include <memory>
#include <string>

#include "dist/job.h"
#include "dist/launcher.h"
#include "dist/mpi/plugin.h"

namespace tessera::dist {

struct MpiPlugin {
  std::string path;     // where it is, or would be
  std::string problem;  // why it cannot be used, and what to do; "" where it can
  const mpi::Plugin* functions = nullptr;
};

MpiPlugin find_mpi_plugin();

// The other processes that `launcher` started. UserError where there is no plugin or where its MPI does not know them.
std::unique_ptr<Transport> join_by_mpi(const Launcher& launcher, const JobOptions&, Share&);

}  // namespace tessera::dist
