// `ckpt export`: a checkpoint becomes a model as they are published: config.json and safetensors files, under published
// tensor names, beside the vocabulary.
#pragma once

#include <string>

#include "core/dtype.h"

namespace tessera::train {

struct ExportOptions {
  DType matrices = DType::bf16;        // or f32; what training keeps exact (norms, gates, routers) is float32 always
  int64_t file_bytes = 5'000'000'000;  // of tensors, at most, unless one alone is larger
};
struct ExportReport {
  std::string path;
  int64_t files = 0, tensors = 0, tensor_bytes = 0;
};

// `out` must not exist: it appears whole or not at all. `checkpoint`: as find_checkpoint takes it.
ExportReport export_checkpoint(const std::string& checkpoint, const std::string& out, const ExportOptions& = {});

}  // namespace tessera::train
