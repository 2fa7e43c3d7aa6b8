// The plan: which tokens make up training sequence q, for every q >= 0.
//
// A pure function of (stores, weights, context, seed): the mixer chooses the source of each sequence, the source's
// stream gives its next packed sequence. So the state of a loader is {plan hash, next q}, whatever the number of
// processes, and resuming needs no iterator. Sequences are planned in blocks of 65,536; the counters at the begin of
// each block are kept, so that going back costs one block. Not for use by several threads at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/mixer.h"
#include "data/source_stream.h"
#include "data/store.h"

namespace tessera::data {

struct PlanSource {
  const Store* store = nullptr;
  std::string name;        // for messages
  double weight = 1;       // share of tokens, relative to the other sources
  int64_t min_tokens = 0;  // documents outside [min_tokens, max_tokens] are left out;
  int64_t max_tokens = 0;  // 0: no upper bound
  int64_t max_epochs = 0;  // 0: endless; a source that is used up leaves its weight to the others
};

struct PlanOptions {
  std::vector<PlanSource> sources;
  int64_t context = 0;  // most tokens in a sequence
  uint64_t seed = 0;
};

struct SourceProgress {
  int64_t sequences = 0, tokens = 0;
  double epochs = 0;  // tokens over tokens in the source
};

class Plan {
 public:
  explicit Plan(PlanOptions options);

  const std::string& hash() const { return hash_; }  // of all that decides what the sequences are
  int64_t context() const { return options_.context; }
  int32_t sources() const { return static_cast<int32_t>(options_.sources.size()); }
  const PlanSource& source(int32_t s) const { return options_.sources[static_cast<size_t>(s)]; }
  const Store& store(int32_t s) const { return *source(s).store; }
  int64_t vocab_size() const { return store(0).meta().vocab_size; }

  std::vector<Segment> sequence(int64_t q);
  std::vector<SourceProgress> progress(int64_t q);  // of sequences [0, q), by source

 private:
  struct Counters {
    Mixer mixer;
    std::vector<SourceProgress> given;
  };
  struct Choice {
    int32_t source;
    int64_t index;  // in the source's stream
  };

  Choice advance(Counters& counters);
  Choice choice(int64_t q);
  const Counters& counters_before_block(int64_t block);
  std::string compute_hash() const;

  PlanOptions options_;
  std::vector<SourceStream> streams_;
  std::string hash_;
  std::vector<Counters> block_begin_;  // counters before each block that was reached
  // The block in use: its choices so far, and the counters after them.
  int64_t block_ = -1;
  std::vector<Choice> choices_;
  std::optional<Counters> after_;
};

}  // namespace tessera::data
