// The endless sequence of packed sequences of one source.
//
// Documents come epoch after epoch, each epoch in a permutation of its own, and are packed in buffers of 65,536 (the
// last buffer of an epoch is shorter). A buffer's sequences are shuffled: packing sorts by length, and pieces of one
// long document side by side would make each step see a few documents instead of a sample of all (router loads and
// losses then swing from step to step). A buffer is a pure function of (documents, seed, epoch, number), so any
// sequence can be made again.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/store.h"

namespace tessera::data {

// Tokens [begin, begin + length) of a document. A sequence is a list of these; each is a document to the model.
struct Segment {
  int32_t source = 0;
  int64_t doc = 0, begin = 0, length = 0;
  bool continued = false;  // an earlier piece of the document precedes it, in another sequence
  bool operator==(const Segment&) const = default;
};

struct StreamOptions {
  int32_t source = 0;
  int64_t context = 0;
  uint64_t seed = 0;
  int64_t min_tokens = 0;  // documents outside [min_tokens, max_tokens] are left out;
  int64_t max_tokens = 0;  // 0: no upper bound
  int64_t max_epochs = 0;  // 0: endless
};

class SourceStream {
 public:
  // `store` must outlive the stream.
  SourceStream(const Store& store, const StreamOptions& options);

  // Whether sequence i exists: always, until `max_epochs` are over.
  bool has(int64_t i);
  std::span<const Segment> sequence(int64_t i);  // valid until the next call
  int64_t tokens(int64_t i);
  int64_t epoch_of(int64_t i);

  int64_t documents() const { return documents_; }
  int64_t tokens_per_epoch() const { return tokens_per_epoch_; }

 private:
  struct Buffer {
    int64_t number = 0;
    std::vector<Segment> segments;
    std::vector<int64_t> begin{0};  // of each sequence in segments
  };

  int64_t document_at(int64_t position) const;
  int64_t buffers_per_epoch() const;
  bool buffer_exists(int64_t number) const;
  std::vector<Segment> cut_documents(int64_t number) const;
  Buffer make(int64_t number) const;
  const Buffer& buffer(int64_t number);
  const Buffer& buffer_of(int64_t i);  // that holds sequence i

  const Store& store_;
  StreamOptions options_;
  std::vector<int64_t> chosen_;  // documents inside the length range; empty when that is all of them
  int64_t documents_ = 0;
  int64_t tokens_per_epoch_ = 0;
  std::vector<int64_t> first_{0};                      // first sequence of each buffer, as far as they were made
  std::vector<std::shared_ptr<const Buffer>> recent_;  // the last few used
};

}  // namespace tessera::data
