// Writes one token store: documents are appended, `finish` makes the directory readable.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/hash.h"
#include "data/store_format.h"
#include "data/tokenizer.h"

namespace tessera::data {

class StoreWriter {
 public:
  // `directory` is made. A token file is closed when the next document would take it past `shard_bytes`.
  StoreWriter(const std::string& directory, const Tokenizer& tokenizer, int64_t shard_bytes);

  // `tokens` end with EOS.
  void add(std::span<const int32_t> tokens, const Hash128& hash, int64_t text_bytes, uint32_t group);
  StoreMeta finish();

  const StoreMeta& meta() const { return meta_; }

 private:
  // A file of the store, hashed as it is written.
  struct HashedFile {
    explicit HashedFile(const std::string& path) : file(path) {}
    void write(std::string_view bytes) {
      hasher.add(bytes);
      file.write(bytes);
    }
    FileWriter file;
    Hasher hasher;
  };
  void close_shard();
  void close_file(HashedFile& hashed, const std::string& name);
  void write_tokens(std::span<const int32_t> tokens);
  void write_index();

  std::string directory_;
  int64_t shard_bytes_;
  StoreMeta meta_;
  std::vector<uint16_t> vocab_bytes_;
  std::vector<DocRecord> records_;
  std::optional<HashedFile> shard_;
  std::vector<uint16_t> narrow_;
};

}  // namespace tessera::data
