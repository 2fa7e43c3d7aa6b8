// A fixed list of batches for validation: the same for every call, run and machine, so that losses can be compared.
#pragma once

#include <cstdint>
#include <vector>

#include "data/batch.h"
#include "data/store.h"

namespace tessera::data {

struct ValidationOptions {
  int64_t context = 0;
  int64_t max_tokens = 0;    // 0: the whole store, once. Else a sample of whole sequences up to so many tokens
  int64_t batch_tokens = 0;  // sequences are gathered up to so many tokens; 0: one sequence a batch
  int64_t min_document = 0;  // only documents of at least so many tokens, for losses by position
};

class ValidationSet {
 public:
  // `store` must outlive the set. A store without a document of the wanted length gives no batches.
  ValidationSet(const Store& store, const ValidationOptions& options);

  int64_t count() const { return static_cast<int64_t>(batches_.size()); }
  Batch batch(int64_t i) const;
  int64_t tokens() const { return tokens_; }

 private:
  using Sequence = std::vector<Segment>;
  const Store& store_;
  std::vector<std::vector<Sequence>> batches_;
  int64_t tokens_ = 0;
};

}  // namespace tessera::data
