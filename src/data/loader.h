// The loader: batches of a plan, in order or from anywhere. Tokens come from memory maps, so a batch is a copy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/batch.h"
#include "data/plan.h"

namespace tessera::data {

// All that a checkpoint keeps of the data: it does not depend on the number of processes or on batch sizes.
struct LoaderState {
  std::string plan_hash;
  int64_t next_sequence = 0;
};

class Loader {
 public:
  explicit Loader(Plan& plan);

  Batch batch(int64_t q_begin, int64_t count);  // sequences [q_begin, q_begin + count)
  Batch next(int64_t count);                    // the following ones, by the state

  LoaderState state() const { return {plan_.hash(), next_}; }
  // Refuses the state of another plan: its sequence numbers mean other tokens.
  void restore(const LoaderState& state);

 private:
  Plan& plan_;
  std::vector<const Store*> stores_;
  int64_t next_ = 0;
};

}  // namespace tessera::data
