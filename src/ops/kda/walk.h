// How packed documents are shared out: parts, which are the units of parallel work beside the heads.
//
// Part p holds the documents that begin at tokens [1024 p, 1024 (p + 1)), whole. The parts of a document depend on no
// later token and on no thread count, so that sums over tokens (dA_log, ddt_bias), which are taken part by part, keep
// their bits when documents are appended; and their number is bounded by the tokens, not by the documents.
#pragma once

#include <algorithm>

#include "ops/kda/op.h"

namespace tessera::ops::kda::cpu {

inline constexpr int64_t kPartTokens = 1024;

inline int64_t part_count(int64_t tokens) { return std::max<int64_t>(1, (tokens + kPartTokens - 1) / kPartTokens); }

struct Part {
  int64_t document;  // the first one; the part ends where the next begins
  int64_t chunk;     // the first one of that document
};

// Fills part_count() + 1 entries.
inline void find_parts(const Documents& documents, int64_t tokens, int64_t chunk, Part* parts) {
  const int64_t count = part_count(tokens);
  int64_t document = 0, chunks = 0;
  for (int64_t p = 0; p <= count; ++p) {
    while (document < documents.count() && (p == count || documents.begin(document) < p * kPartTokens)) {
      chunks += (documents.length(document) + chunk - 1) / chunk;
      ++document;
    }
    parts[p] = {document, chunks};
  }
}

}  // namespace tessera::ops::kda::cpu
