#include "model/context_shard.h"

#include <algorithm>

namespace tessera::model {

ContextShard::ContextShard(dist::Communicator& axis, std::span<const int64_t> offsets) : axis_(&axis) {
  const int64_t tokens = offsets.back();
  for (int r = 0; r <= axis.size(); ++r) begins_.push_back(tokens * r / axis.size());
  for (int r = 0; r < axis.size(); ++r) {
    Ends ends{begin(r), end(r)};
    if (begin(r) < end(r)) {
      ends.first_begin = *(std::ranges::upper_bound(offsets, begin(r)) - 1);
      ends.last_end = *std::ranges::lower_bound(offsets, end(r));
    }
    of_rank_.push_back(ends);
  }
  offsets_.push_back(0);
  for (int64_t offset : offsets) {  // of documents with tokens
    const int64_t here = std::min(offset, end(rank())) - begin(rank());
    if (here > offsets_.back()) offsets_.push_back(here);
  }
  key_offsets_ = offsets_;
  const int64_t before = begin(rank()) - first_begin(rank());
  for (size_t i = 1; i < key_offsets_.size(); ++i) key_offsets_[i] += before;
}

bool ContextShard::any_crosses() const {
  for (int r = 0; r < size(); ++r) {
    if (enters(r)) return true;
  }
  return false;
}

}  // namespace tessera::model
