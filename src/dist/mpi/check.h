// Checks of MPI calls: a failure throws with the call, MPI's text for the error, file and line.
#pragma once

#include <mpi.h>

#include <string>

#include "core/error.h"

namespace tessera::dist::mpi {

inline std::string error_text(int error) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(error, text, &length);
  return {text, static_cast<size_t>(length)};
}

inline void check(int error, const char* call, const char* file, int line) {
  if (error != MPI_SUCCESS) throw Error(fmt::format("{}:{}: {}: {}", file, line, call, error_text(error)));
}

}  // namespace tessera::dist::mpi

#define TESSERA_MPI(call) ::tessera::dist::mpi::check((call), #call, __FILE__, __LINE__)
