// JSON Lines: one object a line, one document an object.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/importers.h"

namespace tessera::data {

// Ranges of whole lines of about `target_bytes`, so that one large file is worked on by all threads: (begin, bytes).
std::vector<std::pair<int64_t, int64_t>> line_ranges(const std::string& path, int64_t target_bytes);

void import_jsonl(const Unit& unit, Imported& out);

}  // namespace tessera::data
