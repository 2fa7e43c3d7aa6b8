// A token store, opened for reading: memory-mapped, shared by any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/file.h"
#include "data/store_format.h"

namespace tessera::data {

class Store {
 public:
  // Checks that all files are there with the sizes and headers that meta.json gives; `verify` reads them through.
  explicit Store(const std::string& directory);

  const std::string& directory() const { return directory_; }
  const StoreMeta& meta() const { return meta_; }
  int64_t documents() const { return meta_.documents; }
  const DocRecord& document(int64_t doc) const { return records_[static_cast<size_t>(doc)]; }
  int64_t length(int64_t doc) const { return document(doc).tokens; }

  // Copies tokens [begin, begin + ids.size()) of a document; fails when one is outside the vocabulary.
  void read(int64_t doc, int64_t begin, std::span<int32_t> ids) const;
  std::vector<int32_t> read(int64_t doc) const;

  // Bytes of text that a token id stands for: 0 for specials.
  int64_t bytes_of_token(int32_t id) const { return vocab_bytes_[static_cast<size_t>(id)]; }

  // Reads everything and compares hashes, records and tokens. Empty: all is well; else one line a fault.
  std::vector<std::string> verify() const;

 private:
  struct Shard {
    MappedFile file;
    int64_t begin, end;  // tokens
  };
  const Shard& shard_of(const DocRecord& record, int64_t doc) const;
  void verify_documents(std::vector<std::string>& faults) const;

  std::string directory_;
  StoreMeta meta_;
  std::vector<Shard> shards_;
  MappedFile index_, vocab_;
  std::span<const DocRecord> records_;
  std::span<const uint16_t> vocab_bytes_;
};

// Fails unless the store was made with a tokenizer of this fingerprint.
void check_tokenizer(const Store& store, const std::string& fingerprint);

}  // namespace tessera::data
