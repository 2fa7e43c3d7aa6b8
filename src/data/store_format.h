// The token store on disk: a directory with
//   tokens-NNN.bin    token ids, little-endian, u16 when the vocabulary is below 65,536, else u32; no document crosses
//   a
//                     file end
//   docs.idx          IndexHeader, then one DocRecord a document
//   vocab-bytes.bin   u16 a token id: how many bytes of text it stands for
//   meta.json         StoreMeta; written last
// The functions that read take memory, so that they can be fuzzed.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/hash.h"

namespace tessera::data {

inline constexpr int64_t kStoreVersion = 1;
inline constexpr int kHistogramBuckets = 48;  // bucket b: lengths in [2^b, 2^(b+1))

struct IndexHeader {
  static constexpr uint64_t kMagic = 0x3153434F44535354;  // "TSSDOCS1"
  uint64_t magic = kMagic;
  uint32_t version = kStoreVersion;
  uint32_t record_bytes = 0;
  uint64_t documents = 0;
  uint64_t reserved = 0;
};

struct DocRecord {
  int64_t token_begin = 0;               // over all token files laid end to end
  int64_t tokens = 0;                    // with the EOS at the end
  uint64_t hash_low = 0, hash_high = 0;  // of the text
  int64_t text_bytes = 0;                // UTF-8 bytes of the text that was tokenised
  uint32_t flags = 0;
  uint32_t group = 0;  // documents of one work or directory share it
};
static_assert(sizeof(IndexHeader) == 32 && sizeof(DocRecord) == 48);

struct StoreFile {
  std::string name;
  int64_t bytes = 0;
  std::string hash;
};

struct StoreMeta {
  std::string tokenizer_name, tokenizer_fingerprint;
  int64_t vocab_size = 0;
  int64_t eos_id = 0;
  int64_t token_bytes = 2;  // of one id in tokens-NNN.bin
  int64_t documents = 0, tokens = 0, text_bytes = 0;
  std::array<int64_t, kHistogramBuckets> histogram{};  // documents by length in tokens
  std::vector<StoreFile> files;                        // token files in order, docs.idx, vocab-bytes.bin
  std::string fingerprint;                             // of everything above
};

std::string token_file_name(int64_t number);  // tokens-000.bin
int histogram_bucket(int64_t tokens);
std::string fingerprint_of(const StoreMeta& meta);

std::string write_meta(const StoreMeta& meta);
// `path` is for messages. Refuses what write_meta could not have written.
StoreMeta parse_meta(std::string_view json, const std::string& path);

// The records inside `bytes` (8-byte aligned, as a mapping is). Checks the header and the size, not the records.
std::span<const DocRecord> parse_index(std::string_view bytes, const std::string& path);

// Checks one record against where the one before it ended.
void check_record(const DocRecord& record, int64_t index, int64_t expected_begin, int64_t total_tokens,
                  const std::string& path);

}  // namespace tessera::data
