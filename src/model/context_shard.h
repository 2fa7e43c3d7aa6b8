// A micro-batch cut among the processes of the context axis: each has a contiguous range of its tokens. Documents that
// cross a cut go on in the next process. Every process knows all documents, so that nothing has to be asked.
#pragma once

#include <span>
#include <vector>

#include "dist/communicator.h"

namespace tessera::model {

class ContextShard {
 public:
  // `offsets`: the documents of the whole micro-batch, (N + 1).
  ContextShard(dist::Communicator& axis, std::span<const int64_t> offsets);

  dist::Communicator& axis() const { return *axis_; }
  int rank() const { return axis_->rank(); }
  int size() const { return axis_->size(); }
  // Tokens of a process: [begin, end).
  int64_t begin(int rank) const { return begins_[static_cast<size_t>(rank)]; }
  int64_t end(int rank) const { return begins_[static_cast<size_t>(rank) + 1]; }
  int64_t tokens(int rank) const { return end(rank) - begin(rank); }
  // Where the first document of a process begins, and the last one ends, in the micro-batch.
  int64_t first_begin(int rank) const { return of_rank_[static_cast<size_t>(rank)].first_begin; }
  int64_t last_end(int rank) const { return of_rank_[static_cast<size_t>(rank)].last_end; }
  bool enters(int rank) const { return first_begin(rank) < begin(rank); }  // a document from the process before
  bool leaves(int rank) const { return last_end(rank) > end(rank); }       // to the next one
  bool any_crosses() const;

  const std::vector<int64_t>& offsets() const { return offsets_; }          // (n + 1) of this process's documents
  const std::vector<int64_t>& key_offsets() const { return key_offsets_; }  // the first one from its begin on

 private:
  struct Ends {
    int64_t first_begin, last_end;
  };
  dist::Communicator* axis_;
  std::vector<int64_t> begins_, offsets_, key_offsets_;
  std::vector<Ends> of_rank_;
};

}  // namespace tessera::model
