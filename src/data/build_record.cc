#include "data/build_record.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "data/store_format.h"

namespace tessera::data {
namespace {

using nlohmann::json;

constexpr int kBuildVersion = 1;

json to_json(const BuildSummary::Split& split) {
  return {{"documents", split.documents},
          {"tokens", split.tokens},
          {"text_bytes", split.text_bytes},
          {"fingerprint", split.fingerprint}};
}

BuildSummary::Split split_from(const json& value) {
  return {value.at("documents").get<int64_t>(), value.at("tokens").get<int64_t>(),
          value.at("text_bytes").get<int64_t>(), value.at("fingerprint").get<std::string>()};
}

}  // namespace

std::string fingerprint_of(const BuildOptions& options, const Tokenizer& tokenizer, const std::vector<Unit>& units) {
  Hasher hasher;
  hasher.add_number(kBuildVersion);
  hasher.add_number(kStoreVersion);
  hasher.add_field(tokenizer.fingerprint());
  hasher.add_number(std::llround(options.valid_fraction * 1e6));
  hasher.add_number(options.min_tokens);
  hasher.add_number(options.shard_bytes);
  for (const Unit& unit : units) {
    hasher.add_number(static_cast<int64_t>(unit.kind));
    hasher.add_field(unit.name);
    hasher.add_field(unit.text_field);
    hasher.add_number(unit.begin);
    hasher.add_number(unit.bytes);
    hasher.add_number(unit.modified_ns);
    hasher.add_number(static_cast<int64_t>(unit.files.size()));
    for (const std::string& file : unit.files) hasher.add_field(file);
  }
  return hasher.digest().hex();
}

std::string write_build_record(const BuildSummary& summary, const std::string& tokenizer) {
  json dropped = json::object();
  for (const auto& [reason, entry] : summary.import.dropped) {
    dropped[reason] = {{"count", entry.count}, {"examples", entry.examples}};
  }
  const json root{
      {"version", kBuildVersion},
      {"fingerprint", summary.fingerprint},
      {"tokenizer", tokenizer},
      {"files", summary.import.files},
      {"documents", summary.import.documents},
      {"dropped", dropped},
      {"duplicates", summary.duplicates},
      {"too_short", summary.too_short},
      {"held_out_tail", summary.held_out_tail},
      {"train", to_json(summary.train)},
      {"valid", to_json(summary.valid)},
  };
  // Names of files may hold bytes that are not UTF-8, which JSON cannot: they are shown as U+FFFD.
  return root.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

BuildSummary read_build_record(const std::string& path, std::string* tokenizer) {
  const std::string text = read_file(path);
  try {
    const json root = json::parse(text);
    BuildSummary summary;
    summary.fingerprint = root.at("fingerprint").get<std::string>();
    summary.import.files = root.at("files").get<int64_t>();
    summary.import.documents = root.at("documents").get<int64_t>();
    for (const auto& [reason, entry] : root.at("dropped").items()) {
      summary.import.dropped[reason] = {entry.at("count").get<int64_t>(),
                                        entry.at("examples").get<std::vector<std::string>>()};
    }
    summary.duplicates = root.at("duplicates").get<int64_t>();
    summary.too_short = root.at("too_short").get<int64_t>();
    summary.held_out_tail = root.at("held_out_tail").get<bool>();
    summary.train = split_from(root.at("train"));
    summary.valid = split_from(root.at("valid"));
    if (tokenizer != nullptr) *tokenizer = root.at("tokenizer").get<std::string>();
    return summary;
  } catch (const json::exception& error) {
    fail_user("{}: not the record of a data build ({}); remove the directory and build it again", path, error.what());
  }
}

}  // namespace tessera::data
