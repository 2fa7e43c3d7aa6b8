// Checks of CUDA runtime calls: a failure throws with the call, the name of the error, file and line.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/error.h"

namespace tessera::detail {

inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  throw Error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " + cudaGetErrorName(error) + ", " +
              cudaGetErrorString(error));
}

}  // namespace tessera::detail

#define TESSERA_CUDA(call) ::tessera::detail::check_cuda((call), #call, __FILE__, __LINE__)
