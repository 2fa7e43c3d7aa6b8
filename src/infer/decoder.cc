#include "infer/decoder.h"

#include <algorithm>
#include <array>

namespace tessera::infer {
namespace {

// One call: hidden rows of the new tokens, then the logits of the last.
View run(Context& ctx, const model::Model& model, const model::Weights& weights, const View& ids,
         model::Caches& caches) {
  const DType dtype = weights.value.front().dtype();
  const std::array<int64_t, 2> one_document{0, ids.elements()};
  const View hidden = ctx.arena.allocate(dtype, {ids.elements(), model.config().width});
  const View logits = ctx.arena.allocate(exact_type(dtype), {1, model.config().vocabulary});
  model.hidden(ctx, weights, ids, place_documents(ctx, one_document), &caches, hidden);
  model.logits(ctx, weights, hidden.row_range(ids.elements() - 1, 1), logits);
  return logits;
}

}  // namespace

static void read_logits(const View& logits, std::vector<float>& to) {
  if (logits.dtype() == DType::f32) {
    copy(logits, View(to.data(), DType::f32, logits.shape()));
  } else {  // float64 on the host: a proof
    std::copy_n(logits.as<double>(), to.size(), to.begin());
  }
}

// The peak of a prompt that fills the whole capacity, run dry.
int64_t Decoder::plan_bytes(const model::Model& model, DType dtype, int64_t capacity, Product product, Device device) {
  Arena dry = Arena::dry();
  Context ctx{Device::dry, dry, nullptr, product, device};
  const model::Weights weights = model::allocate_weights(dry, model.table(), dtype, false);
  const int64_t base = dry.used();
  model::Caches caches = model.allocate_caches(dry, 1, capacity, dtype);
  {
    Arena::Scope prompt(dry);
    run(ctx, model, weights, dry.allocate(DType::i32, {capacity}), caches);
  }
  // Decode reads the whole cache through the absorbed form, with workspace of its own.
  for (auto& mla : caches.mla) std::fill(mla.length.begin(), mla.length.end(), capacity - 1);
  run(ctx, model, weights, dry.allocate(DType::i32, {1}), caches);
  return dry.peak() - base;
}

Decoder::Decoder(const model::Model& model, const model::Weights& weights, int64_t capacity, Product product,
                 Device device)
    : model_(model),
      weights_(weights),
      capacity_(capacity),
      product_(product),
      device_(device),
      arena_(plan_bytes(model, weights.value.front().dtype(), capacity, product, device),
             weights.value.front().memory()),
      caches_(model.allocate_caches(arena_, 1, capacity, weights.value.front().dtype())),
      logits_(static_cast<size_t>(model.config().vocabulary)) {
  cache_bytes_ = arena_.used();
}

std::span<const float> Decoder::append(std::span<const int32_t> ids) {
  TESSERA_CHECK(!ids.empty() && length_ + static_cast<int64_t>(ids.size()) <= capacity_,
                "{} tokens after {} in a decoder of {}", ids.size(), length_, capacity_);
  for (int32_t id : ids) {
    if (id < 0 || id >= model_.config().vocabulary) {
      fail_user("token id {} is outside the model's vocabulary of {}; use the tokenizer the model was trained with", id,
                model_.config().vocabulary);
    }
  }
  Arena::Scope scope(arena_);
  Context ctx{device_, arena_, nullptr, product_};
  const View input = arena_.allocate(DType::i32, {static_cast<int64_t>(ids.size())});
  copy(View(const_cast<int32_t*>(ids.data()), DType::i32, input.shape()), input);
  read_logits(run(ctx, model_, weights_, input, caches_), logits_);
  length_ += static_cast<int64_t>(ids.size());
  return logits_;
}

}  // namespace tessera::infer
