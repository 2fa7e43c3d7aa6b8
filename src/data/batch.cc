#include "data/batch.h"

namespace tessera::data {
namespace {

void append_segment(const Segment& segment, const Store& store, Batch& batch) {
  const bool goes_on = segment.begin + segment.length < store.length(segment.doc);
  const size_t begin = batch.ids.size(), length = static_cast<size_t>(segment.length);
  // One token more than the segment when the document goes on: it is the last target.
  batch.ids.resize(begin + length + (goes_on ? 1 : 0));
  store.read(segment.doc, segment.begin, std::span(batch.ids).subspan(begin));
  batch.targets.insert(batch.targets.end(), batch.ids.begin() + static_cast<std::ptrdiff_t>(begin) + 1,
                       batch.ids.end());
  batch.ids.resize(begin + length);
  batch.targets.resize(begin + length, kNoTarget);
  for (const int32_t target : std::span(batch.targets).subspan(begin)) {
    if (target == kNoTarget) continue;
    ++batch.loss_tokens;
    batch.text_bytes += store.bytes_of_token(target);
  }
  batch.offsets.push_back(batch.tokens());
  batch.segments.push_back(segment);
}

}  // namespace

void append_sequence(std::span<const Segment> segments, std::span<const Store* const> stores, Batch& batch) {
  for (const Segment& segment : segments) {
    append_segment(segment, *stores[static_cast<size_t>(segment.source)], batch);
  }
  batch.sequence_offsets.push_back(batch.tokens());
}

}  // namespace tessera::data
