// A model's description as published models of this family have it: the other way of import.h.
#pragma once

#include <string>

#include "model/config.h"

namespace tessera::model {

// config.json (text) as Kimi Linear released it, K3's text_config where tensor names are prefixed; import_hf_config
// makes the same model of it. UserError, that begins with `where`, for a model that it has no words for.
struct ExportedWith {
  std::string weights_type = "float32";  // of the matrices beside it
  int64_t end_of_document = -1;          // the vocabulary's id; -1: not known
};
std::string export_hf_config(const ModelConfig&, const ExportedWith&, const std::string& where);

}  // namespace tessera::model
