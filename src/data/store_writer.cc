#include "data/store_writer.h"

#include "core/error.h"

namespace tessera::data {
namespace {

template <class T>
std::string_view bytes_of_range(std::span<const T> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

}  // namespace

StoreWriter::StoreWriter(const std::string& directory, const Tokenizer& tokenizer, int64_t shard_bytes)
    : directory_(directory), shard_bytes_(shard_bytes) {
  make_directory(directory);
  meta_.tokenizer_name = tokenizer.name();
  meta_.tokenizer_fingerprint = tokenizer.fingerprint();
  meta_.vocab_size = tokenizer.vocab_size();
  meta_.eos_id = tokenizer.eos_id();
  meta_.token_bytes = meta_.vocab_size < 65536 ? 2 : 4;
  for (int64_t id = 0; id < meta_.vocab_size; ++id) {
    vocab_bytes_.push_back(static_cast<uint16_t>(tokenizer.token_bytes(static_cast<int32_t>(id)).size()));
  }
}

void StoreWriter::add(std::span<const int32_t> tokens, const Hash128& hash, int64_t text_bytes, uint32_t group) {
  TESSERA_CHECK(!tokens.empty() && tokens.back() == meta_.eos_id, "a document must end with EOS");
  const int64_t count = static_cast<int64_t>(tokens.size());
  if (shard_ && shard_->file.size() + count * meta_.token_bytes > shard_bytes_) close_shard();
  if (!shard_) shard_.emplace(directory_ + "/" + token_file_name(static_cast<int64_t>(meta_.files.size())));
  write_tokens(tokens);
  records_.push_back({meta_.tokens, count, hash.low, hash.high, text_bytes, 0, group});
  ++meta_.documents;
  meta_.tokens += count;
  meta_.text_bytes += text_bytes;
  ++meta_.histogram[static_cast<size_t>(histogram_bucket(count))];
}

void StoreWriter::write_tokens(std::span<const int32_t> tokens) {
  if (meta_.token_bytes == 4) return shard_->write(bytes_of_range(tokens));
  narrow_.assign(tokens.begin(), tokens.end());
  shard_->write(bytes_of_range(std::span<const uint16_t>(narrow_)));
}

void StoreWriter::close_file(HashedFile& hashed, const std::string& name) {
  hashed.file.close();
  meta_.files.push_back({name, hashed.file.size(), hashed.hasher.digest().hex()});
}

void StoreWriter::close_shard() {
  close_file(*shard_, token_file_name(static_cast<int64_t>(meta_.files.size())));
  shard_.reset();
}

void StoreWriter::write_index() {
  HashedFile file(directory_ + "/docs.idx");
  IndexHeader header;
  header.record_bytes = sizeof(DocRecord);
  header.documents = records_.size();
  file.write({reinterpret_cast<const char*>(&header), sizeof header});
  file.write(bytes_of_range(std::span<const DocRecord>(records_)));
  close_file(file, "docs.idx");
}

StoreMeta StoreWriter::finish() {
  if (shard_) close_shard();
  write_index();
  HashedFile vocab(directory_ + "/vocab-bytes.bin");
  vocab.write(bytes_of_range(std::span<const uint16_t>(vocab_bytes_)));
  close_file(vocab, "vocab-bytes.bin");
  meta_.fingerprint = fingerprint_of(meta_);
  write_file_synced(directory_ + "/meta.json", write_meta(meta_));
  return meta_;
}

}  // namespace tessera::data
