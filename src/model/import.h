// Published models: their configuration files, and the spellings their tensor names come in.
//
// Kimi Linear and the text part of Kimi K3 share one configuration dialect (both say model_type "kimi_linear"), so the
// fields decide, never the name. Two generations of key spellings are read: linear_attn_config {...} as released, and
// the flat linear_* keys of later Hugging Face ports.
#pragma once

#include <string>
#include <vector>

#include "model/config.h"
#include "model/parameters.h"

namespace tessera::model {

// config.json (text) -> model. K3's {"text_config": {...}} is unwrapped. UserError names missing or contradicting keys.
ModelConfig import_hf_config(const std::string& json, const std::string& where);

// Other spellings under which published files hold a tensor of ours, most usual first; the first is ours.
std::vector<std::string> spellings(const std::string& published_name);

}  // namespace tessera::model
