#include "data/tokenizer.h"

#include <array>

#include "core/error.h"
#include "core/hash.h"
#include "data/sentencepiece.h"
#include "data/utf8.h"

namespace tessera::data {
namespace {

constexpr int32_t kBytes = 256;
constexpr int32_t kByteVocab = 272;
constexpr int32_t kFirstReserved = 260;

class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() {
    for (int32_t i = 0; i < kBytes; ++i) bytes_[static_cast<size_t>(i)] = static_cast<char>(static_cast<uint8_t>(i));
    specials_ = {256, 257, 258, 259, {}};
    for (int32_t id = kFirstReserved; id < kByteVocab; ++id) specials_.reserved.push_back(id);
  }

  const std::string& name() const override { return name_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  int64_t vocab_size() const override { return kByteVocab; }
  const Specials& specials() const override { return specials_; }

  std::string_view token_bytes(int32_t id) const override {
    TESSERA_CHECK(id >= 0 && id < kByteVocab, "token id {} outside a vocabulary of {}", id, kByteVocab);
    return id < kBytes ? std::string_view(&bytes_[static_cast<size_t>(id)], 1) : std::string_view();
  }

  void append_encoded(std::string_view text, std::vector<int32_t>& ids) const override {
    const size_t begin = ids.size();
    ids.resize(begin + text.size());
    for (size_t i = 0; i < text.size(); ++i) ids[begin + i] = static_cast<uint8_t>(text[i]);
  }

 private:
  std::string name_ = "bytes";
  std::string fingerprint_ = hash_of("tessera bytes 272").hex();
  Specials specials_;
  std::array<char, kBytes> bytes_;
};

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  append_encoded(text, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += token_bytes(id);
  return text;
}

std::shared_ptr<const Tokenizer> make_byte_tokenizer() {
  static const auto tokenizer = std::make_shared<const ByteTokenizer>();
  return tokenizer;
}

std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& spec) {
  return spec == "bytes" ? make_byte_tokenizer() : load_sentencepiece(spec);
}

std::string StreamDecoder::push(int32_t id) {
  pending_ += tokenizer_->token_bytes(id);
  std::string shown;
  size_t at = 0;
  while (at < pending_.size()) {
    const int length = utf8_character(std::string_view(pending_).substr(at));
    if (length == 0) break;
    if (length < 0) {
      append_utf8(0xFFFD, shown);
      ++at;
    } else {
      shown.append(pending_, at, static_cast<size_t>(length));
      at += static_cast<size_t>(length);
    }
  }
  pending_.erase(0, at);
  return shown;
}

std::string StreamDecoder::finish() {
  std::string shown;
  if (!pending_.empty()) append_utf8(0xFFFD, shown);
  pending_.clear();
  return shown;
}

}  // namespace tessera::data
