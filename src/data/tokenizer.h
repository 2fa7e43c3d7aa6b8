// Tokenizers: text to token ids and back, without loss.
//
// decode(encode(x)) == x for every text x, also for text that is not UTF-8. Every id stands for a fixed string of bytes
// (`token_bytes`; empty for specials), so decoding works token by token, and the bytes that a range of tokens stands
// for, which bits-per-byte divides by, are a sum over ids.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

// Ids with a meaning of their own; -1: this tokenizer has none. Encoding text never yields them.
struct Specials {
  int32_t eos = -1;  // document end
  int32_t pad = -1;
  int32_t bos = -1;
  int32_t file_sep = -1;          // begins each file of a source tree
  std::vector<int32_t> reserved;  // free for turns and tools
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual const std::string& name() const = 0;         // "bytes", or "sentencepiece"
  virtual const std::string& fingerprint() const = 0;  // hex; equal exactly when all ids mean the same
  virtual int64_t vocab_size() const = 0;
  virtual const Specials& specials() const = 0;
  virtual std::string_view token_bytes(int32_t id) const = 0;
  virtual void append_encoded(std::string_view text, std::vector<int32_t>& ids) const = 0;

  std::vector<int32_t> encode(std::string_view text) const;
  std::string decode(std::span<const int32_t> ids) const;
  int32_t eos_id() const { return specials().eos; }
};

// Ids 0..255 are bytes, 256 eos, 257 pad, 258 bos, 259 file_sep, 260..271 reserved: 272 in all, a multiple of 16.
std::shared_ptr<const Tokenizer> make_byte_tokenizer();

// `spec` is "bytes" or the path of a SentencePiece model.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& spec);

// Text for a terminal, token by token: withholds a character until it is complete, shows U+FFFD for bytes that are no
// character.
class StreamDecoder {
 public:
  explicit StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}
  std::string push(int32_t id);
  std::string finish();  // what is still withheld can no longer become a character

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string pending_;
};

}  // namespace tessera::data
