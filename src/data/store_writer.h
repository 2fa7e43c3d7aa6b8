// Writes one token store: documents are appended, `finish` makes the directory readable.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/file.h"
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
  void close_shard();
  void close_file(FileWriter& file, const std::string& name);
  void write_tokens(std::span<const int32_t> tokens);
  void write_index();

  std::string directory_;
  int64_t shard_bytes_;
  StoreMeta meta_;
  std::vector<uint16_t> vocab_bytes_;
  std::vector<DocRecord> records_;
  std::optional<FileWriter> shard_;
  std::vector<uint16_t> narrow_;
};

}  // namespace tessera::data
