// Parity with another system: logits and gradients for given token ids, as files anyone can compare.
#pragma once

#include <string>

#include "core/dtype.h"

namespace tessera::train {

struct ParityReport {
  int64_t tokens = 0;
  double loss = 0;  // mean next-token loss, nats
};

// `ids_file`: safetensors with an integer tensor "ids" (any shape, one sequence). Writes, where named, "logits"
// (T, vocabulary) in float32, and the gradients of the mean next-token loss under the parameters' published names.
ParityReport write_parity(const std::string& checkpoint, const std::string& ids_file, const std::string& logits_file,
                          const std::string& gradients_file);

}  // namespace tessera::train
