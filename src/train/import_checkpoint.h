// `ckpt import`: a published model (config.json and safetensors) becomes a checkpoint of ours.
#pragma once

#include <string>

#include "model/model.h"

namespace tessera::train {

struct ImportReport {
  model::ModelConfig config;
  std::string checkpoint;  // empty: only the description was read
  int64_t tensors = 0, parameters = 0;
};

// `config_file`: config.json. `weights`: a safetensors file, an index, or a directory that holds them; empty: read the
// description alone. `out`: a directory of checkpoints. Missing, extra, misshapen and wrongly typed tensors come all in
// one UserError, and nothing is written.
ImportReport import_checkpoint(const std::string& config_file, const std::string& weights, const std::string& out);

}  // namespace tessera::train
