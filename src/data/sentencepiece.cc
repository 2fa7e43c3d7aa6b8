// SentencePiece replaces ' ' by U+2581 inside pieces, so U+2581 itself in a text would come back as a space: it is cut
// out of the text before encoding and spelled in byte pieces. Anything else that an encoding does not give back exactly
// (bytes that are not UTF-8) is spelled in byte pieces too.
#include "data/sentencepiece.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <sstream>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "data/utf8.h"

namespace tessera::data {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";
constexpr size_t kChunkBytes = 1 << 14;  // encoded at once: the merge queue stays in cache
constexpr size_t kChunkLimit = 1 << 16;  // a chunk without a line end is cut here
constexpr size_t kMaxSentenceBytes = 1 << 14;

std::string with_spaces(std::string_view piece) {
  std::string text;
  for (size_t i = 0; i < piece.size();) {
    if (piece.substr(i, kSpaceMark.size()) == kSpaceMark) {
      text.push_back(' ');
      i += kSpaceMark.size();
    } else {
      text.push_back(piece[i++]);
    }
  }
  return text;
}

bool is_continuation(char byte) { return (static_cast<uint8_t>(byte) & 0xC0) == 0x80; }

// Where the chunk that begins `text` ends: after the last line end of a run, so that no piece of line ends is split.
size_t chunk_end(std::string_view text) {
  if (text.size() <= kChunkBytes) return text.size();
  size_t at = text.find('\n', kChunkBytes);
  if (at != std::string_view::npos && at < kChunkLimit) {
    while (at < text.size() && text[at] == '\n' && at < kChunkLimit) ++at;
    return at;
  }
  if (text.size() <= kChunkLimit) return text.size();
  size_t cut = kChunkLimit;
  while (cut > kChunkLimit - 4 && is_continuation(text[cut])) --cut;
  return cut;
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::string& path, const std::string& model) : path_(path) {
    if (!processor_.LoadFromSerializedProto(model).ok() || processor_.GetPieceSize() == 0) {
      fail_user(
          "{}: {} bytes that are no SentencePiece model; wanted a .model file; train one, or take "
          "tokenizer = \"bytes\"",
          path, model.size());
    }
    fingerprint_ = hash_of(model).hex();
    read_pieces();
    read_specials();
    check_lossless();
  }

  const std::string& name() const override { return name_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  int64_t vocab_size() const override { return static_cast<int64_t>(pieces_.size()); }
  const Specials& specials() const override { return specials_; }

  std::string_view token_bytes(int32_t id) const override {
    TESSERA_CHECK(id >= 0 && id < vocab_size(), "token id {} outside a vocabulary of {}", id, vocab_size());
    return pieces_[static_cast<size_t>(id)];
  }

  void append_encoded(std::string_view text, std::vector<int32_t>& ids) const override {
    while (!text.empty()) {
      const size_t mark = text.find(kSpaceMark);
      append_without_marks(text.substr(0, mark), ids);
      if (mark == std::string_view::npos) return;
      append_bytes(kSpaceMark, ids);
      text.remove_prefix(mark + kSpaceMark.size());
    }
  }

 private:
  void append_without_marks(std::string_view text, std::vector<int32_t>& ids) const {
    std::vector<int> chunk_ids;
    while (!text.empty()) {
      const std::string_view chunk = text.substr(0, chunk_end(text));
      text.remove_prefix(chunk.size());
      const auto status = processor_.Encode({chunk.data(), chunk.size()}, &chunk_ids);
      if (status.ok() && spells(chunk_ids, chunk)) {
        ids.insert(ids.end(), chunk_ids.begin(), chunk_ids.end());
      } else {
        append_bytes(chunk, ids);
      }
    }
  }

  void append_bytes(std::string_view bytes, std::vector<int32_t>& ids) const {
    for (const char c : bytes) ids.push_back(byte_ids_[static_cast<uint8_t>(c)]);
  }

  bool spells(const std::vector<int>& ids, std::string_view text) const {
    for (const int id : ids) {
      const std::string& piece = pieces_[static_cast<size_t>(id)];
      if (text.substr(0, piece.size()) != piece || processor_.IsUnknown(id)) return false;
      text.remove_prefix(piece.size());
    }
    return text.empty();
  }

  void read_pieces() {
    for (int id = 0; id < processor_.GetPieceSize(); ++id) {
      const bool text = !processor_.IsControl(id) && !processor_.IsUnknown(id) && !processor_.IsUnused(id);
      pieces_.push_back(text ? with_spaces(processor_.IdToPiece(id)) : std::string());
    }
    for (int byte = 0; byte < 256; ++byte) {
      const int id = processor_.PieceToId(fmt::format("<0x{:02X}>", byte));
      if (id < 0 || !processor_.IsByte(id)) {
        fail_user("{}: no piece for byte {:02X}, wanted all 256; train the model with byte_fallback=true", path_, byte);
      }
      byte_ids_[static_cast<size_t>(byte)] = id;
      pieces_[static_cast<size_t>(id)] = std::string(1, static_cast<char>(static_cast<uint8_t>(byte)));
    }
  }

  int32_t control(const std::string& piece) const {
    const int id = processor_.PieceToId(piece);
    return id >= 0 && processor_.IsControl(id) ? id : -1;
  }

  void read_specials() {
    specials_.eos = processor_.eos_id();
    specials_.pad = processor_.pad_id();
    specials_.bos = processor_.bos_id();
    specials_.file_sep = control("<file_sep>");
    for (int i = 0; control(fmt::format("<reserved_{}>", i)) >= 0; ++i) {
      specials_.reserved.push_back(control(fmt::format("<reserved_{}>", i)));
    }
    if (specials_.eos < 0) fail_user("{}: no </s> piece, which must mark the document end", path_);
  }

  void check_lossless() const {
    constexpr std::string_view kProbe = "a  b \xEF\xAC\x81 c";  // double space, a ligature that NFKC would take apart
    std::vector<int> ids;
    if (!processor_.Encode({kProbe.data(), kProbe.size()}, &ids).ok() || !spells(ids, kProbe)) {
      fail_user(
          "{}: this model changes the text it encodes; wanted one trained with normalization_rule_name=identity, "
          "add_dummy_prefix=false, remove_extra_whitespaces=false and byte_fallback=true",
          path_);
    }
  }

  sentencepiece::SentencePieceProcessor processor_;
  std::string path_;
  std::string name_ = "sentencepiece";
  std::string fingerprint_;
  Specials specials_;
  std::vector<std::string> pieces_;
  std::array<int32_t, 256> byte_ids_;
};

// The training texts as lines: a line end is a piece of its own, so nothing is learned across one.
class Lines final : public sentencepiece::SentenceIterator {
 public:
  Lines(const std::function<bool(std::string&)>& next, int64_t limit) : next_(next), left_(limit) { Next(); }

  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  void Next() override {
    do {
      while (at_ == text_.size()) {
        at_ = 0;
        if (left_ <= 0 || !next_(text_)) {
          done_ = true;
          return;
        }
        left_ -= static_cast<int64_t>(text_.size());
      }
      take_line();
    } while (line_.empty());
  }

 private:
  void take_line() {
    const std::string_view ahead = std::string_view(text_).substr(at_, kMaxSentenceBytes + 1);
    const size_t newline = ahead.find('\n');
    size_t length = std::min({newline, ahead.size(), kMaxSentenceBytes});
    while (length < std::min(newline, ahead.size()) && length > 1 && is_continuation(ahead[length])) --length;
    line_ = ahead.substr(0, length);
    at_ += length + (length == newline ? 1 : 0);
  }

  const std::function<bool(std::string&)>& next_;
  int64_t left_;
  std::string text_, line_;
  size_t at_ = 0;
  bool done_ = false;
};

std::string control_symbols() {
  std::string symbols = "<file_sep>";
  for (int i = 0; i < 11; ++i) symbols += fmt::format(",<reserved_{}>", i);  // with unk, bos, eos, pad: 16
  return symbols;
}

}  // namespace

std::shared_ptr<const Tokenizer> load_sentencepiece(const std::string& path) {
  return std::make_shared<const SentencePieceTokenizer>(path, read_file(path));
}

void train_sentencepiece(const std::function<bool(std::string&)>& next, const SentencePieceOptions& options,
                         const std::string& out_path) {
  Lines lines(next, options.max_training_bytes);
  if (lines.done()) fail_user("no text to train a vocabulary on; name files that hold text");
  const std::unordered_map<std::string, std::string> spec{
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(options.vocab_size)},
      {"character_coverage", fmt::format("{}", options.character_coverage)},
      {"byte_fallback", "true"},
      {"split_digits", "true"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"max_sentence_length", std::to_string(kMaxSentenceBytes)},
      {"user_defined_symbols", "\n,\t"},
      {"control_symbols", control_symbols()},
      {"unk_id", "0"},
      {"bos_id", "1"},
      {"eos_id", "2"},
      {"pad_id", "3"},
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(spec, &lines, &model);
  if (!status.ok()) {
    fail_user(
        "training a vocabulary of {} pieces failed: {}; take a smaller one for little text, a larger one or a lower "
        "character_coverage for many characters",
        options.vocab_size, status.ToString());
  }
  write_file_atomic(out_path, model);
}

}  // namespace tessera::data
