// A batch: sequences of a plan laid end to end as one row of tokens, with hard document boundaries.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/documents.h"
#include "data/source_stream.h"

namespace tessera::data {

inline constexpr int32_t kNoTarget = -1;

// Each segment is a document. The target of a token is the token after it in the document, also across the end of a
// segment when the document goes on; the last token of a document (EOS) has none. So EOS is predicted, and nothing
// after it. The unfilled end of a sequence is left out, so T may be less than sequences * context.
struct Batch {
  std::vector<int32_t> ids;                  // (T)
  std::vector<int32_t> targets;              // (T), kNoTarget where nothing is predicted
  std::vector<int64_t> offsets{0};           // (N + 1) of documents
  std::vector<int64_t> sequence_offsets{0};  // (sequences + 1) in tokens; each is also in `offsets`
  std::vector<Segment> segments;             // (N) where each document comes from
  int64_t loss_tokens = 0;                   // targets that are there
  int64_t text_bytes = 0;                    // UTF-8 bytes that those targets stand for, exactly; EOS and specials: 0

  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }
  Documents documents() const { return {offsets}; }
};

// Appends one sequence. `stores[segment.source]` holds its tokens.
void append_sequence(std::span<const Segment> segments, std::span<const Store* const> stores, Batch& batch);

}  // namespace tessera::data
