#include "data/store.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/parallel.h"

namespace tessera::data {
namespace {

MappedFile open_checked(const std::string& directory, const StoreFile& expected) {
  MappedFile file(directory + "/" + expected.name);
  if (file.size() != expected.bytes) {
    fail_user("{}: {} bytes, meta.json says {}; the store is damaged: build it again", file.path(), file.size(),
              expected.bytes);
  }
  return file;
}

// Copies ids of type T and returns the largest, so that the copy is also the check.
template <class T>
uint32_t copy_ids(const std::byte* from, std::span<int32_t> ids) {
  const T* source = reinterpret_cast<const T*>(from);
  uint32_t largest = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint32_t id = source[i];
    largest = std::max(largest, id);
    ids[i] = static_cast<int32_t>(id);
  }
  return largest;
}

}  // namespace

Store::Store(const std::string& directory)
    : directory_(directory), meta_(parse_meta(read_file(directory + "/meta.json"), directory + "/meta.json")) {
  const size_t token_files = meta_.files.size() - 2;
  int64_t begin = 0;
  for (size_t i = 0; i < token_files; ++i) {
    const int64_t end = begin + meta_.files[i].bytes / meta_.token_bytes;
    shards_.push_back({open_checked(directory, meta_.files[i]), begin, end});
    begin = end;
  }
  index_ = open_checked(directory, meta_.files[token_files]);
  vocab_ = open_checked(directory, meta_.files[token_files + 1]);
  records_ = parse_index(index_.text(), index_.path());
  if (static_cast<int64_t>(records_.size()) != meta_.documents) {
    fail_user("{}: {} documents, meta.json says {}; the store is damaged: build it again", index_.path(),
              records_.size(), meta_.documents);
  }
  if (vocab_.size() != 2 * meta_.vocab_size) {
    fail_user("{}: {} bytes for a vocabulary of {}; the store is damaged: build it again", vocab_.path(), vocab_.size(),
              meta_.vocab_size);
  }
  vocab_bytes_ = {reinterpret_cast<const uint16_t*>(vocab_.bytes().data()), static_cast<size_t>(meta_.vocab_size)};
}

const Store::Shard& Store::shard_of(const DocRecord& record, int64_t doc) const {
  const auto next = std::upper_bound(shards_.begin(), shards_.end(), record.token_begin,
                                     [](int64_t token, const Shard& shard) { return token < shard.begin; });
  const Shard* shard = next == shards_.begin() ? nullptr : &*(next - 1);
  if (shard == nullptr || record.tokens < 1 || record.tokens > shard->end - record.token_begin) {
    fail_user("{}: document {} is {} tokens from {}, which no token file holds; the store is damaged: build it again",
              index_.path(), doc, record.tokens, record.token_begin);
  }
  return *shard;
}

void Store::read(int64_t doc, int64_t begin, std::span<int32_t> ids) const {
  TESSERA_CHECK(doc >= 0 && doc < documents(), "document {} of {}", doc, documents());
  const DocRecord& record = document(doc);
  const int64_t count = static_cast<int64_t>(ids.size());
  TESSERA_CHECK(begin >= 0 && begin + count <= record.tokens, "tokens {} + {} of a document of {}", begin, count,
                record.tokens);
  const Shard& shard = shard_of(record, doc);
  const std::byte* from = shard.file.bytes().data() + (record.token_begin - shard.begin + begin) * meta_.token_bytes;
  const uint32_t largest = meta_.token_bytes == 2 ? copy_ids<uint16_t>(from, ids) : copy_ids<uint32_t>(from, ids);
  if (count > 0 && largest >= static_cast<uint64_t>(meta_.vocab_size)) {
    fail_user("{}: token id {} in document {}, outside the vocabulary of {}; the store is damaged: build it again",
              shard.file.path(), largest, doc, meta_.vocab_size);
  }
}

std::vector<int32_t> Store::read(int64_t doc) const {
  std::vector<int32_t> ids(static_cast<size_t>(length(doc)));
  read(doc, 0, ids);
  return ids;
}

std::vector<std::string> Store::verify() const {
  std::vector<std::string> faults(meta_.files.size());
  parallel_items(static_cast<int64_t>(meta_.files.size()), [&](int64_t i) {
    const StoreFile& expected = meta_.files[static_cast<size_t>(i)];
    const MappedFile file = open_checked(directory_, expected);
    const std::string found = hash_hex(file.text());
    if (found != expected.hash) {
      faults[static_cast<size_t>(i)] = fmt::format("{}: hash {}, meta.json says {}", file.path(), found, expected.hash);
    }
  });
  std::erase(faults, std::string());
  verify_documents(faults);
  return faults;
}

void Store::verify_documents(std::vector<std::string>& faults) const {
  int64_t begin = 0;
  try {
    for (int64_t doc = 0; doc < documents(); ++doc) {
      check_record(document(doc), doc, begin, meta_.tokens, index_.path());
      begin += length(doc);
      if (read(doc).back() != meta_.eos_id) faults.push_back(fmt::format("document {} does not end with EOS", doc));
    }
    if (begin != meta_.tokens) faults.push_back(fmt::format("documents hold {} of {} tokens", begin, meta_.tokens));
  } catch (const UserError& error) {
    faults.push_back(error.what());
  }
}

void check_tokenizer(const Store& store, const std::string& fingerprint) {
  const StoreMeta& meta = store.meta();
  if (meta.tokenizer_fingerprint != fingerprint) {
    fail_user("{}: made with tokenizer {} ({}), wanted {}; build the store with the tokenizer of the run",
              store.directory(), meta.tokenizer_name, meta.tokenizer_fingerprint, fingerprint);
  }
}

}  // namespace tessera::data
