// A build works in waves of about kWaveBytes of input: import and hash in parallel, decide about each document in
// order, tokenise in parallel, write in order. So memory stays bounded and the result does not depend on threads.
#include "data/build.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/parallel.h"
#include "data/build_output.h"
#include "data/build_record.h"
#include "data/store_writer.h"

namespace tessera::data {
namespace {

constexpr int64_t kWaveBytes = 64 << 20;
constexpr uint64_t kSplitParts = 10'000;   // valid_fraction is rounded to this
constexpr size_t kSmallestHoldOut = 4096;  // bytes of a document worth cutting a validation tail from
constexpr std::string_view kFileSepText = "<file_sep>";

struct Prepared {
  Document document;
  Hash128 hash;
  bool keep = true;
  bool valid = false;
  int64_t text_bytes = 0;
  std::vector<int32_t> tokens;
};

struct HashOfHash {
  size_t operator()(const Hash128& hash) const { return hash.low; }
};

void tokenize(const Tokenizer& tokenizer, Prepared& item) {
  const std::string_view text = item.document.text;
  item.text_bytes = static_cast<int64_t>(text.size());
  size_t at = 0;
  for (const int64_t mark : item.document.file_marks) {
    tokenizer.append_encoded(text.substr(at, static_cast<size_t>(mark) - at), item.tokens);
    at = static_cast<size_t>(mark);
    if (tokenizer.specials().file_sep >= 0) {
      item.tokens.push_back(tokenizer.specials().file_sep);
    } else {
      tokenizer.append_encoded(kFileSepText, item.tokens);
      item.text_bytes += static_cast<int64_t>(kFileSepText.size());
    }
  }
  tokenizer.append_encoded(text.substr(at), item.tokens);
  item.tokens.push_back(tokenizer.eos_id());
  std::string().swap(item.document.text);  // no longer needed, and a wave holds many
}

// Where to cut a tail of about `bytes` off a text: at a line begin, else at a character.
size_t tail_begin(std::string_view text, size_t bytes) {
  size_t at = text.size() - bytes;
  const size_t newline = text.rfind('\n', at);
  if (newline != std::string_view::npos && newline + 1 >= text.size() / 2) return newline + 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

class Build {
 public:
  Build(const BuildOptions& options, const Tokenizer& tokenizer, const std::string& directory, BuildSummary& summary)
      : options_(options),
        tokenizer_(tokenizer),
        summary_(summary),
        train_(directory + "/train", tokenizer, options.shard_bytes),
        valid_(directory + "/valid", tokenizer, options.shard_bytes),
        valid_parts_(static_cast<uint64_t>(std::llround(options.valid_fraction * double(kSplitParts)))) {}

  void run(const std::vector<Unit>& units, const std::function<void(const BuildProgress&)>& progress) {
    BuildProgress state;
    for (const Unit& unit : units) state.bytes_total += unit.bytes;
    for (size_t begin = 0; begin < units.size();) {
      size_t end = begin;
      int64_t bytes = 0;
      while (end < units.size() && (end == begin || bytes + units[end].bytes <= kWaveBytes))
        bytes += units[end++].bytes;
      wave(std::span(units).subspan(begin, end - begin), begin == 0 && end == units.size());
      begin = end;
      state.bytes_done += bytes;
      state.documents = train_.meta().documents + valid_.meta().documents;
      state.tokens = train_.meta().tokens + valid_.meta().tokens;
      if (progress) progress(state);
    }
    if (state.documents == 0) fail_empty();
    summary_.train = finished(train_);
    summary_.valid = finished(valid_);
  }

 private:
  void wave(std::span<const Unit> units, bool whole_corpus) {
    std::vector<Prepared> items = imported(units);
    choose(items);
    if (whole_corpus) hold_out_tail(items);
    parallel_items(static_cast<int64_t>(items.size()), [&](int64_t i) {
      Prepared& item = items[static_cast<size_t>(i)];
      if (item.keep) tokenize(tokenizer_, item);
    });
    for (Prepared& item : items) {
      if (!item.keep) continue;
      if (static_cast<int64_t>(item.tokens.size()) < options_.min_tokens) {
        ++summary_.too_short;
        continue;
      }
      (item.valid ? valid_ : train_).add(item.tokens, item.hash, item.text_bytes, item.document.group);
      item.tokens = {};
    }
  }

  std::vector<Prepared> imported(std::span<const Unit> units) {
    std::vector<Imported> results(units.size());
    std::vector<std::vector<Hash128>> hashes(units.size());
    parallel_items(static_cast<int64_t>(units.size()), [&](int64_t i) {
      const size_t u = static_cast<size_t>(i);
      results[u] = import_unit(units[u]);
      for (const Document& document : results[u].documents) {
        hashes[u].push_back(
            hash_of(std::string_view(document.text).substr(static_cast<size_t>(document.content_begin))));
      }
    });
    std::vector<Prepared> items;
    for (size_t u = 0; u < results.size(); ++u) {
      summary_.import.add(results[u].summary);
      for (size_t d = 0; d < results[u].documents.size(); ++d) {
        Prepared& item = items.emplace_back();
        item.document = std::move(results[u].documents[d]);
        item.hash = hashes[u][d];
      }
    }
    return items;
  }

  void choose(std::vector<Prepared>& items) {
    for (Prepared& item : items) {
      item.keep = seen_.insert(item.hash).second;
      item.valid = item.hash.low % kSplitParts < valid_parts_;
      if (!item.keep) ++summary_.duplicates;
    }
  }

  void hold_out_tail(std::vector<Prepared>& items) {
    Prepared* longest = nullptr;
    size_t total = 0;
    for (Prepared& item : items) {
      if (!item.keep) continue;
      if (item.valid || valid_parts_ == 0) return;
      total += item.document.text.size();
      if (longest == nullptr || item.document.text.size() > longest->document.text.size()) longest = &item;
    }
    if (longest == nullptr || longest->document.text.size() < kSmallestHoldOut) return;
    Document& head = longest->document;
    const size_t bytes = static_cast<size_t>(std::ceil(double(total) * options_.valid_fraction));
    const size_t cut = tail_begin(head.text, std::clamp<size_t>(bytes, 1, head.text.size() / 2));
    Prepared tail;
    tail.document.name = head.name;
    tail.document.text = head.text.substr(cut);
    tail.document.group = head.group;
    tail.hash = hash_of(tail.document.text);
    tail.valid = true;
    std::erase_if(head.file_marks, [&](int64_t mark) {
      if (static_cast<size_t>(mark) < cut) return false;
      tail.document.file_marks.push_back(mark - static_cast<int64_t>(cut));
      return true;
    });
    head.text.resize(cut);
    longest->hash = hash_of(head.text);
    summary_.held_out_tail = true;
    items.push_back(std::move(tail));
  }

  [[noreturn]] void fail_empty() const {
    std::string paths;
    for (const Input& input : options_.inputs) paths += (paths.empty() ? "" : ", ") + input.path;
    fail_user(
        "no documents in {}: found {}\n  too short (under {} tokens): {}\nwanted at least one; check the paths, the "
        "kind of each input and min_tokens",
        paths, summary_.import.describe(), options_.min_tokens, summary_.too_short);
  }

  static BuildSummary::Split finished(StoreWriter& writer) {
    const StoreMeta meta = writer.finish();
    return {meta.documents, meta.tokens, meta.text_bytes, meta.fingerprint};
  }

  const BuildOptions& options_;
  const Tokenizer& tokenizer_;
  BuildSummary& summary_;
  StoreWriter train_, valid_;
  uint64_t valid_parts_;
  std::unordered_set<Hash128, HashOfHash> seen_;
};

void check_options(const BuildOptions& options) {
  if (options.inputs.empty()) fail_user("no inputs; name at least one file or directory");
  if (options.out.empty()) fail_user("no output directory; name one");
  if (!(options.valid_fraction >= 0 && options.valid_fraction < 1)) {
    fail_user("valid_fraction {}; wanted a share from 0 up to, not including, 1", options.valid_fraction);
  }
  if (options.min_tokens < 1) fail_user("min_tokens {}; wanted at least 1", options.min_tokens);
  if (options.shard_bytes < 1) fail_user("shard_bytes {}; wanted at least 1", options.shard_bytes);
}

std::vector<Unit> all_units(const BuildOptions& options, ImportSummary& summary) {
  std::vector<Unit> units;
  for (const Input& input : options.inputs) {
    check_output_outside(options.out, input.path);
    for (Unit& unit : list_units(input, summary)) units.push_back(std::move(unit));
  }
  return units;
}

}  // namespace

BuildSummary build_store(const BuildOptions& options, const std::function<void(const BuildProgress&)>& progress) {
  check_options(options);
  const std::shared_ptr<const Tokenizer> tokenizer = load_tokenizer(options.tokenizer);
  BuildSummary summary;
  const std::vector<Unit> units = all_units(options, summary.import);
  summary.fingerprint = fingerprint_of(options, *tokenizer, units);
  OutputDirectory output(options.out);
  if (output.exists()) {
    BuildSummary earlier = output.record(options.replace);
    if (earlier.fingerprint == summary.fingerprint) {
      earlier.up_to_date = true;
      return earlier;
    }
    if (!options.replace) {
      fail_user("{}: holds data built from other inputs or options; choose another output, or ask to replace it",
                options.out);
    }
  }
  const std::string& directory = output.begin();
  Build(options, *tokenizer, directory, summary).run(units, progress);
  const bool bytes = options.tokenizer == "bytes";
  if (!bytes) write_file_atomic(directory + "/tokenizer.model", read_file(options.tokenizer));
  write_file_atomic(directory + "/build.json", write_build_record(summary, bytes ? "bytes" : "tokenizer.model"));
  output.commit();
  return summary;
}

std::shared_ptr<const Tokenizer> load_store_tokenizer(const std::string& out) {
  std::string name;
  read_build_record(out + "/build.json", &name);
  return load_tokenizer(name == "bytes" ? name : out + "/" + name);
}

std::string BuildSummary::describe() const {
  std::string text = import.describe();
  if (duplicates > 0) text += fmt::format("\n  dropped {} (exact duplicate)", duplicates);
  if (too_short > 0) text += fmt::format("\n  dropped {} (too short)", too_short);
  text += fmt::format("\n  train {} documents, {} tokens; valid {} documents, {} tokens", train.documents, train.tokens,
                      valid.documents, valid.tokens);
  if (held_out_tail) text += " (the end of the longest document)";
  return text;
}

}  // namespace tessera::data
