#include "data/validation.h"

#include "core/error.h"

namespace tessera::data {
namespace {

constexpr uint64_t kSeed = 0;  // never the run's seed: two runs must see the same sample

bool any_of_length(const Store& store, int64_t min_document) {
  for (int64_t doc = 0; doc < store.documents(); ++doc) {
    if (store.length(doc) >= min_document) return true;
  }
  return false;
}

}  // namespace

ValidationSet::ValidationSet(const Store& store, const ValidationOptions& options) : store_(store) {
  TESSERA_CHECK(options.context >= 2, "validation with a context of {}", options.context);
  if (!any_of_length(store, options.min_document)) return;
  StreamOptions stream_options;
  stream_options.context = options.context;
  stream_options.seed = kSeed;
  stream_options.min_tokens = options.min_document;
  stream_options.max_epochs = 1;
  SourceStream stream(store, stream_options);
  int64_t in_batch = 0;
  for (int64_t i = 0; stream.has(i); ++i) {
    const int64_t tokens = stream.tokens(i);
    if (options.max_tokens > 0 && tokens_ > 0 && tokens_ + tokens > options.max_tokens) break;
    if (batches_.empty() || in_batch + tokens > options.batch_tokens) {
      batches_.emplace_back();
      in_batch = 0;
    }
    const auto segments = stream.sequence(i);
    batches_.back().emplace_back(segments.begin(), segments.end());
    in_batch += tokens;
    tokens_ += tokens;
  }
}

Batch ValidationSet::batch(int64_t i) const {
  TESSERA_CHECK(i >= 0 && i < count(), "validation batch {} of {}", i, count());
  const Store* store = &store_;
  Batch batch;
  for (const Sequence& sequence : batches_[static_cast<size_t>(i)]) append_sequence(sequence, {&store, 1}, batch);
  return batch;
}

}  // namespace tessera::data
