#include "data/store_format.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tessera::data {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "token stores are mapped as they lie on the disk");

constexpr std::string_view kFormat = "tessera-tokens";
constexpr int64_t kMaxCount = int64_t{1} << 56;  // far above any store; keeps sums of counts inside 64 bits

[[noreturn]] void fail_damaged(const std::string& path, const std::string& found) {
  fail_user("{}: {}; the store is damaged or from another version: build it again", path, found);
}

const json& member(const json& object, const char* key, const std::string& path) {
  const auto found = object.find(key);
  if (found == object.end()) fail_damaged(path, fmt::format("\"{}\" is missing", key));
  return *found;
}

int64_t count(const json& object, const char* key, const std::string& path, int64_t limit = kMaxCount) {
  const json& value = member(object, key, path);
  if (!value.is_number_integer() || value < 0 || value > limit) {
    fail_damaged(path, fmt::format("\"{}\" is {}, wanted a count up to {}", key, value.dump(), limit));
  }
  return value.get<int64_t>();
}

std::string string(const json& object, const char* key, const std::string& path) {
  const json& value = member(object, key, path);
  if (!value.is_string()) fail_damaged(path, fmt::format("\"{}\" is {}, wanted a string", key, value.dump()));
  return value.get<std::string>();
}

const json& list(const json& object, const char* key, const std::string& path) {
  const json& value = member(object, key, path);
  if (!value.is_array()) fail_damaged(path, fmt::format("\"{}\" is no list", key));
  return value;
}

void check_files(const StoreMeta& meta, const std::string& path) {
  int64_t token_file_bytes = 0;
  const size_t token_files = meta.files.size() < 2 ? 0 : meta.files.size() - 2;
  for (size_t i = 0; i < token_files; ++i) {
    if (meta.files[i].name != token_file_name(static_cast<int64_t>(i)) || meta.files[i].bytes % meta.token_bytes != 0) {
      fail_damaged(path, fmt::format("file {} is \"{}\" of {} bytes, wanted {} of whole tokens", i, meta.files[i].name,
                                     meta.files[i].bytes, token_file_name(static_cast<int64_t>(i))));
    }
    token_file_bytes += meta.files[i].bytes;
    if (token_file_bytes > kMaxCount) fail_damaged(path, "token files larger than any disk");
  }
  if (meta.files.size() < 2 || meta.files[token_files].name != "docs.idx" ||
      meta.files[token_files + 1].name != "vocab-bytes.bin") {
    fail_damaged(path, "the list of files does not end with docs.idx and vocab-bytes.bin");
  }
  if (token_file_bytes / meta.token_bytes != meta.tokens) {
    fail_damaged(path, fmt::format("token files of {} bytes for {} tokens of {} bytes", token_file_bytes, meta.tokens,
                                   meta.token_bytes));
  }
}

}  // namespace

std::string token_file_name(int64_t number) { return fmt::format("tokens-{:03}.bin", number); }

int histogram_bucket(int64_t tokens) {
  return tokens <= 1
             ? 0
             : std::min(static_cast<int>(std::bit_width(static_cast<uint64_t>(tokens))) - 1, kHistogramBuckets - 1);
}

std::string fingerprint_of(const StoreMeta& meta) {
  Hasher hasher;
  hasher.add_number(kStoreVersion);
  hasher.add_field(meta.tokenizer_name);
  hasher.add_field(meta.tokenizer_fingerprint);
  for (const int64_t value :
       {meta.vocab_size, meta.eos_id, meta.token_bytes, meta.documents, meta.tokens, meta.text_bytes}) {
    hasher.add_number(value);
  }
  for (const StoreFile& file : meta.files) {
    hasher.add_field(file.name);
    hasher.add_number(file.bytes);
    hasher.add_field(file.hash);
  }
  return hasher.digest().hex();
}

std::string write_meta(const StoreMeta& meta) {
  json files = json::array();
  for (const StoreFile& file : meta.files) {
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3_128", file.hash}});
  }
  const json root{
      {"format", kFormat},
      {"version", kStoreVersion},
      {"tokenizer", {{"name", meta.tokenizer_name}, {"fingerprint", meta.tokenizer_fingerprint}}},
      {"vocab_size", meta.vocab_size},
      {"eos_id", meta.eos_id},
      {"token_bytes", meta.token_bytes},
      {"documents", meta.documents},
      {"tokens", meta.tokens},
      {"text_bytes", meta.text_bytes},
      {"histogram", meta.histogram},
      {"files", files},
      {"fingerprint", meta.fingerprint},
  };
  return root.dump(2) + "\n";
}

StoreMeta parse_meta(std::string_view text, const std::string& path) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) fail_damaged(path, fmt::format("{} bytes that are no JSON object", text.size()));
  if (string(root, "format", path) != kFormat) fail_damaged(path, "not the description of a token store");
  const int64_t version = count(root, "version", path);
  if (version != kStoreVersion) {
    fail_user("{}: store format {}, this program reads {}: build the store again", path, version, kStoreVersion);
  }
  StoreMeta meta;
  const json& tokenizer = member(root, "tokenizer", path);
  if (!tokenizer.is_object()) fail_damaged(path, "\"tokenizer\" is no object");
  meta.tokenizer_name = string(tokenizer, "name", path);
  meta.tokenizer_fingerprint = string(tokenizer, "fingerprint", path);
  meta.vocab_size = count(root, "vocab_size", path, std::numeric_limits<int32_t>::max());
  meta.eos_id = count(root, "eos_id", path, std::numeric_limits<int32_t>::max());
  meta.token_bytes = count(root, "token_bytes", path);
  if (meta.token_bytes != (meta.vocab_size < 65536 ? 2 : 4)) {
    fail_damaged(path, fmt::format("tokens of {} bytes for a vocabulary of {}", meta.token_bytes, meta.vocab_size));
  }
  meta.documents = count(root, "documents", path);
  meta.tokens = count(root, "tokens", path);
  meta.text_bytes = count(root, "text_bytes", path);
  const json& histogram = list(root, "histogram", path);
  for (size_t i = 0; i < std::min(histogram.size(), meta.histogram.size()); ++i) {
    if (!histogram[i].is_number_integer()) fail_damaged(path, "the histogram holds something else than counts");
    meta.histogram[i] = histogram[i].get<int64_t>();
  }
  for (const json& file : list(root, "files", path)) {
    if (!file.is_object()) fail_damaged(path, "an entry of \"files\" is no object");
    meta.files.push_back({string(file, "name", path), count(file, "bytes", path), string(file, "xxh3_128", path)});
  }
  check_files(meta, path);
  meta.fingerprint = string(root, "fingerprint", path);
  if (meta.fingerprint != fingerprint_of(meta)) {
    fail_damaged(path, fmt::format("fingerprint {}, its contents give {}", meta.fingerprint, fingerprint_of(meta)));
  }
  return meta;
}

std::span<const DocRecord> parse_index(std::string_view bytes, const std::string& path) {
  if (bytes.size() < sizeof(IndexHeader)) fail_damaged(path, fmt::format("{} bytes, too short", bytes.size()));
  TESSERA_CHECK(reinterpret_cast<uintptr_t>(bytes.data()) % alignof(DocRecord) == 0, "{} is not aligned", path);
  const auto* header = reinterpret_cast<const IndexHeader*>(bytes.data());
  if (header->magic != IndexHeader::kMagic) fail_damaged(path, fmt::format("magic {:#x}", header->magic));
  if (header->version != kStoreVersion || header->record_bytes != sizeof(DocRecord)) {
    fail_damaged(path, fmt::format("version {} with records of {} bytes, wanted version {} and {} bytes",
                                   header->version, header->record_bytes, kStoreVersion, sizeof(DocRecord)));
  }
  const size_t record_bytes = bytes.size() - sizeof(IndexHeader);
  if (record_bytes % sizeof(DocRecord) != 0 || record_bytes / sizeof(DocRecord) != header->documents) {
    fail_damaged(path, fmt::format("{} bytes for {} documents, wanted {} bytes each", bytes.size(), header->documents,
                                   sizeof(DocRecord)));
  }
  return {reinterpret_cast<const DocRecord*>(bytes.data() + sizeof(IndexHeader)), record_bytes / sizeof(DocRecord)};
}

void check_record(const DocRecord& record, int64_t index, int64_t expected_begin, int64_t total_tokens,
                  const std::string& path) {
  if (record.token_begin != expected_begin || record.tokens < 1 || record.tokens > total_tokens - expected_begin) {
    fail_damaged(path, fmt::format("document {} is {} tokens from {}, wanted some from {} inside {}", index,
                                   record.tokens, record.token_begin, expected_begin, total_tokens));
  }
}

}  // namespace tessera::data
