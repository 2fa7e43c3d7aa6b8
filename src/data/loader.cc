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

Batch Loader::next(int64_t count) {
  Batch made = batch(next_, count);
  next_ += count;
  return made;
}

void Loader::restore(const LoaderState& state) {
  if (state.plan_hash != plan_.hash()) {
    fail_user(
        "the checkpoint was made with data plan {}, this run has {}: its data, weights, context or seed changed; "
        "restore them, or start the plan anew",
        state.plan_hash, plan_.hash());
  }
  TESSERA_CHECK(state.next_sequence >= 0, "next sequence {}", state.next_sequence);
  next_ = state.next_sequence;
}

}  // namespace tessera::data
