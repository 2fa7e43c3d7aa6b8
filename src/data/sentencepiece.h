// BPE vocabularies by SentencePiece (Kudo and Richardson 2018): loading one and training one.
//
// Only models that keep text as it is are accepted: identity normalisation, no dummy prefix, byte pieces for what the
// vocabulary lacks. `train_sentencepiece` makes such models, with the 16 specials of Specials first.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace tessera::data {

std::shared_ptr<const Tokenizer> load_sentencepiece(const std::string& path);

struct SentencePieceOptions {
  int64_t vocab_size = 32768;
  double character_coverage = 0.9995;               // rarer characters are spelled in bytes
  int64_t max_training_bytes = int64_t{256} << 20;  // BPE training holds the text in memory, several times over
};

// Trains on the texts that `next` yields (false: no more) and writes `out_path`. The result depends on the texts, their
// order and the options alone.
void train_sentencepiece(const std::function<bool(std::string&)>& next, const SentencePieceOptions& options,
                         const std::string& out_path);

}  // namespace tessera::data
