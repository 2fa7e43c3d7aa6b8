#include "data/plan.h"

#include <bit>
#include <cmath>

#include "core/error.h"
#include "core/hash.h"

namespace tessera::data {
namespace {

constexpr int64_t kPlanVersion = 1;  // changes whenever equal options would give other sequences
constexpr int64_t kBlock = 65'536;

void check_options(const PlanOptions& options) {
  if (options.sources.empty()) fail_user("a data plan without sources; name at least one store");
  if (options.context < 2) fail_user("context {}; wanted at least 2 tokens", options.context);
  double sum = 0;
  for (const PlanSource& source : options.sources) {
    TESSERA_CHECK(source.store != nullptr, "source {} has no store", source.name);
    if (!(source.weight >= 0) || !std::isfinite(source.weight)) {
      fail_user("source {}: weight {}; wanted a number of at least 0", source.name, source.weight);
    }
    sum += source.weight;
    check_tokenizer(*source.store, options.sources[0].store->meta().tokenizer_fingerprint);
  }
  if (sum <= 0) fail_user("the weights of all {} sources are 0; give at least one a weight", options.sources.size());
}

std::vector<double> weights_of(const PlanOptions& options) {
  std::vector<double> weights;
  for (const PlanSource& source : options.sources) weights.push_back(source.weight);
  return weights;
}

}  // namespace

Plan::Plan(PlanOptions options) : options_(std::move(options)) {
  check_options(options_);
  for (size_t s = 0; s < options_.sources.size(); ++s) {
    const PlanSource& source = options_.sources[s];
    streams_.emplace_back(*source.store, StreamOptions{static_cast<int32_t>(s), options_.context, options_.seed,
                                                       source.min_tokens, source.max_tokens, source.max_epochs});
  }
  hash_ = compute_hash();
  block_begin_.push_back(
      {Mixer(weights_of(options_), options_.context), std::vector<SourceProgress>(options_.sources.size())});
}

std::string Plan::compute_hash() const {
  Hasher hasher;
  hasher.add_number(kPlanVersion);
  hasher.add_number(options_.context);
  hasher.add_number(static_cast<int64_t>(options_.seed));
  for (const PlanSource& source : options_.sources) {
    hasher.add_field(source.store->meta().fingerprint);
    hasher.add_number(std::bit_cast<int64_t>(source.weight));
    hasher.add_number(source.min_tokens);
    hasher.add_number(source.max_tokens);
    hasher.add_number(source.max_epochs);
  }
  return hasher.digest().hex();
}

Plan::Choice Plan::advance(Counters& counters) {
  for (;;) {
    const int s = counters.mixer.choose();
    if (s < 0) {
      fail_user("all {} sources have been read max_epochs times; add data, raise max_epochs or train on fewer tokens",
                options_.sources.size());
    }
    SourceStream& stream = streams_[static_cast<size_t>(s)];
    SourceProgress& given = counters.given[static_cast<size_t>(s)];
    if (!stream.has(given.sequences)) {
      counters.mixer.drop(s);
      continue;
    }
    const int64_t tokens = stream.tokens(given.sequences);
    counters.mixer.give(s, tokens);
    given.tokens += tokens;
    return {s, given.sequences++};
  }
}

const Plan::Counters& Plan::counters_before_block(int64_t block) {
  while (static_cast<int64_t>(block_begin_.size()) <= block) {
    Counters counters = block_begin_.back();
    for (int64_t i = 0; i < kBlock; ++i) advance(counters);
    block_begin_.push_back(std::move(counters));
  }
  return block_begin_[static_cast<size_t>(block)];
}

Plan::Choice Plan::choice(int64_t q) {
  TESSERA_CHECK(q >= 0, "sequence {}", q);
  if (q / kBlock != block_) {
    after_ = counters_before_block(q / kBlock);
    block_ = q / kBlock;
    choices_.clear();
  }
  while (static_cast<int64_t>(choices_.size()) <= q % kBlock) choices_.push_back(advance(*after_));
  return choices_[static_cast<size_t>(q % kBlock)];
}

std::vector<Segment> Plan::sequence(int64_t q) {
  const Choice chosen = choice(q);
  const auto segments = streams_[static_cast<size_t>(chosen.source)].sequence(chosen.index);
  return {segments.begin(), segments.end()};
}

std::vector<SourceProgress> Plan::progress(int64_t q) {
  TESSERA_CHECK(q >= 0, "sequence {}", q);
  Counters counters = counters_before_block(q / kBlock);
  for (int64_t i = 0; i < q % kBlock; ++i) advance(counters);
  for (size_t s = 0; s < streams_.size(); ++s) {
    counters.given[s].epochs = double(counters.given[s].tokens) / double(streams_[s].tokens_per_epoch());
  }
  return std::move(counters.given);
}

}  // namespace tessera::data
