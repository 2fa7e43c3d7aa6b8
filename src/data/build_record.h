// OUT/build.json: what a build made and from what, so that the same build need not run twice.
#pragma once

#include <string>
#include <vector>

#include "data/build.h"

namespace tessera::data {

std::string fingerprint_of(const BuildOptions& options, const Tokenizer& tokenizer, const std::vector<Unit>& units);

std::string write_build_record(const BuildSummary& summary, const std::string& tokenizer);
BuildSummary read_build_record(const std::string& path, std::string* tokenizer = nullptr);

}  // namespace tessera::data
