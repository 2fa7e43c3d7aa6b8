// Builds token stores from files: OUT/train and OUT/valid, OUT/build.json, and a copy of the vocabulary.
//
// Documents keep the order of the inputs, whatever the number of threads. Exact duplicates (by content hash) and
// documents below `min_tokens` are dropped. A document belongs to the validation set when its content hash says so, so
// the split survives any change of the corpus around it; a corpus so small that no document falls there gives the end
// of its longest document. Everything is written beside OUT and renamed at the end: OUT is whole or absent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/importers.h"
#include "data/tokenizer.h"

namespace tessera::data {

struct BuildOptions {
  std::vector<Input> inputs;
  std::string out;
  std::string tokenizer = "bytes";  // or the path of a SentencePiece model
  double valid_fraction = 0.02;
  int64_t min_tokens = 16;  // with the EOS
  int64_t shard_bytes = int64_t{1} << 30;
  bool replace = false;  // an OUT that was built from something else is replaced instead of refused
};

struct BuildProgress {
  int64_t bytes_done = 0, bytes_total = 0;  // of input files
  int64_t documents = 0, tokens = 0;        // written
};

struct BuildSummary {
  struct Split {
    int64_t documents = 0, tokens = 0, text_bytes = 0;
    std::string fingerprint;  // of the store
  };
  bool up_to_date = false;  // OUT was there, built from the same files with the same options; nothing was done
  std::string fingerprint;  // of inputs (paths, sizes, times) and options
  ImportSummary import;
  int64_t duplicates = 0, too_short = 0;
  bool held_out_tail = false;  // the validation set is the end of the longest document
  Split train, valid;

  std::string describe() const;
};

BuildSummary build_store(const BuildOptions& options, const std::function<void(const BuildProgress&)>& progress = {});

// The tokenizer that the stores below `out` were built with.
std::shared_ptr<const Tokenizer> load_store_tokenizer(const std::string& out);

}  // namespace tessera::data
