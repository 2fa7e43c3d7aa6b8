// A model's description as published models of this family have it: the other way of import.h.
#pragma once

#include <string>

#include "model/config.h"

namespace tessera::model {

// config.json (text) as Kimi Linear released it, K3's text_config where tensor names are prefixed; import_hf_config
// makes the same model of it. `weights_type`: of the matrices beside it. UserError, that begins with `where`, for a
// model that it has no words for.
std::string export_hf_config(const ModelConfig&, const std::string& weights_type, const std::string& where);

}  // namespace tessera::model
