// The loader: batches of a plan, from anywhere. Tokens come from memory maps, so a batch is a copy. It has no state: a
// run keeps {plan hash, next sequence}, which depends neither on the number of processes nor on batch sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "data/batch.h"
#include "data/plan.h"

namespace tessera::data {

class Loader {
 public:
  explicit Loader(Plan& plan);

  Batch batch(int64_t q_begin, int64_t count);  // sequences [q_begin, q_begin + count)

 private:
  Plan& plan_;
  std::vector<const Store*> stores_;
};

}  // namespace tessera::data
