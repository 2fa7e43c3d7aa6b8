// What `tessera data inspect` shows about a token store.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "data/store.h"
#include "data/tokenizer.h"

namespace tessera::data {

struct InspectOptions {
  int64_t context = 8192;     // packing is measured at this length
  int64_t budget_tokens = 0;  // 0: none; else how many epochs a run of so many tokens makes
  int64_t sample_document = 0;
  int64_t sample_tokens = 256;
};

struct PackingReport {
  int64_t context = 0;
  int64_t sequences = 0;  // in one epoch
  int64_t segments = 0;
  int64_t cut_documents = 0;  // longer than the context
  double padding = 0;         // share of sequences * context that no token fills
};

struct Inspection {
  std::string directory, fingerprint;
  std::string tokenizer_name, tokenizer_fingerprint;
  int64_t vocab_size = 0;
  int64_t documents = 0, tokens = 0, text_bytes = 0, token_files = 0, file_bytes = 0;
  double bytes_per_token = 0;
  std::array<int64_t, kHistogramBuckets> histogram{};  // documents of [2^b, 2^(b+1)) tokens
  int64_t shortest = 0, median = 0, longest = 0;       // tokens in a document
  PackingReport packing;
  double epochs = 0;             // budget_tokens over tokens
  int64_t sample_document = -1;  // -1: the store is empty
  int64_t sample_length = 0;     // tokens in that document
  std::string sample_text;       // its beginning
};

// Fails when `tokenizer` is not the store's.
Inspection inspect(const Store& store, const Tokenizer& tokenizer, const InspectOptions& options);

}  // namespace tessera::data
