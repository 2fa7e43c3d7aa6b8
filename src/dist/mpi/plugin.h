// What the binary and libtessera_mpi.so know of each other: both come from one build, so C++ types pass between them.
#pragma once

#include <memory>

#include "dist/job.h"

namespace tessera::dist::mpi {

constexpr int kInterface = 1;  // to be raised with any change here, in JobOptions, Share or Transport

struct Plugin {
  int interface;
  const char* built_with;  // "Open MPI 4.1.4"
  // Joins the other processes, once in a process. The options may change later; they must outlive the transport.
  std::unique_ptr<Transport> (*join)(const JobOptions&, Share&);
};

}  // namespace tessera::dist::mpi

extern "C" const tessera::dist::mpi::Plugin tessera_mpi_plugin;
