#include "data/loader.h"

#include "core/error.h"

namespace tessera::data {

Loader::Loader(Plan& plan) : plan_(plan) {
  for (int32_t s = 0; s < plan.sources(); ++s) stores_.push_back(&plan.store(s));
}

Batch Loader::batch(int64_t q_begin, int64_t count) {
  TESSERA_CHECK(q_begin >= 0 && count >= 0, "batch of {} sequences from {}", count, q_begin);
  Batch batch;
  for (int64_t q = q_begin; q < q_begin + count; ++q) append_sequence(plan_.sequence(q), stores_, batch);
  return batch;
}

}  // namespace tessera::data
