#include "data/importers.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "data/html.h"
#include "data/include_order.h"
#include "data/jsonl.h"
#include "data/utf8.h"

namespace tessera::data {
namespace {

constexpr size_t kExamples = 3;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

constexpr size_t kMaxSourceBytes = 1 << 20;
constexpr size_t kMaxMeanLine = 200;
constexpr size_t kMaxLine = 2000;

std::string with_unix_line_ends(std::string_view text) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\r' || i + 1 == text.size() || text[i + 1] != '\n') out.push_back(text[i]);
  }
  return out;
}

// Why a source file is left out, or null. Long lines mean minified or generated code, which teaches nothing.
const char* source_fault(std::string_view content) {
  if (content.size() > kMaxSourceBytes) return "source file over 1 MiB";
  size_t lines = 0, longest = 0, at = 0;
  while (at < content.size()) {
    const size_t end = std::min(content.find('\n', at), content.size());
    longest = std::max(longest, end - at);
    ++lines;
    at = end + 1;
  }
  if (longest > kMaxLine) return "source line over 2000 bytes";
  if (lines > 0 && content.size() / lines > kMaxMeanLine) return "source lines over 200 bytes on average";
  return nullptr;
}

uint32_t group_of(std::string_view name) {
  const size_t slash = name.rfind('/');
  const std::string_view directory = slash == std::string_view::npos ? std::string_view() : name.substr(0, slash);
  return static_cast<uint32_t>(hash_of(directory).low);
}

// The file as UTF-8, or nothing and a count (an error when the user named this file).
std::optional<std::string> read_text(const std::string& path, const std::string& name, bool named,
                                     ImportSummary& summary) {
  std::string raw;
  try {
    raw = read_file(path);
  } catch (const Error&) {  // a failing disk, too: one file less is no reason to stop
    if (named) throw;
    summary.drop("unreadable", name);
    return std::nullopt;
  }
  const int64_t invalid = find_invalid_utf8(raw);
  if (invalid < 0) return with_unix_line_ends(raw);
  if (named) {
    fail_user("{}: byte {} (0x{:02X}) is not UTF-8; convert the file, for example with iconv -f LATIN1 -t UTF-8", path,
              invalid, static_cast<uint8_t>(raw[static_cast<size_t>(invalid)]));
  }
  summary.drop("not UTF-8", name);
  return std::nullopt;
}

void append_source(const std::string& path, std::string_view content, Document& document) {
  document.file_marks.push_back(static_cast<int64_t>(document.text.size()));
  document.text += path;
  document.text += '\n';
  document.text += content;
  if (!content.ends_with('\n')) document.text += '\n';
}

void keep(Document document, Imported& out) {
  if (document.text.find_first_not_of(" \t\r\n") == std::string::npos) {
    out.summary.drop("empty", document.name);
    return;
  }
  ++out.summary.documents;
  out.documents.push_back(std::move(document));
}

void import_file(const Unit& unit, Imported& out) {
  std::optional<std::string> content = read_text(unit.path, unit.name, unit.named, out.summary);
  if (!content) return;
  Document document{unit.name, {}, {}, 0, group_of(unit.path)};
  if (unit.kind == Kind::html) {
    document.text = html_to_text(*content);
  } else if (unit.kind == Kind::text) {
    document.text = std::move(*content);
  } else if (content->empty()) {
    return out.summary.drop("empty", unit.name);
  } else if (const char* fault = source_fault(*content)) {
    return out.summary.drop(fault, unit.name);
  } else {
    append_source(unit.name, *content, document);
    document.content_begin = static_cast<int64_t>(unit.name.size()) + 1;
  }
  keep(std::move(document), out);
}

void import_tree(const Unit& unit, Imported& out) {
  std::vector<SourceFile> files;
  for (const std::string& name : unit.files) {
    std::optional<std::string> content = read_text(unit.path + "/" + name, name, false, out.summary);
    if (!content) continue;
    if (content->empty()) {
      out.summary.drop("empty", name);
    } else if (const char* fault = source_fault(*content)) {
      out.summary.drop(fault, name);
    } else {
      files.push_back({name, std::move(*content)});
    }
  }
  Document document{unit.name, {}, {}, 0, group_of(unit.path)};
  for (const int64_t i : dependencies_first(include_graph(files))) {
    const SourceFile& file = files[static_cast<size_t>(i)];
    append_source(file.path, file.content, document);
  }
  keep(std::move(document), out);
}

}  // namespace

void ImportSummary::drop(const std::string& reason, const std::string& example) {
  Dropped& entry = dropped[reason];
  ++entry.count;
  if (entry.examples.size() < kExamples) entry.examples.push_back(example);
}

void ImportSummary::add(const ImportSummary& later) {
  files += later.files;
  documents += later.documents;
  for (const auto& [reason, other] : later.dropped) {
    Dropped& entry = dropped[reason];
    entry.count += other.count;
    for (const std::string& example : other.examples) {
      if (entry.examples.size() < kExamples) entry.examples.push_back(example);
    }
  }
}

std::string ImportSummary::describe() const {
  std::string text = fmt::format("{} files, {} documents", files, documents);
  for (const auto& [reason, entry] : dropped) {
    const char* more = entry.count > static_cast<int64_t>(entry.examples.size()) ? ", ..." : "";
    text += fmt::format("\n  dropped {} ({}): {}{}", entry.count, reason, fmt::join(entry.examples, ", "), more);
  }
  return text;
}

Imported import_unit(const Unit& unit) {
  Imported out;
  if (unit.kind == Kind::jsonl) {
    import_jsonl(unit, out);
  } else if (!unit.files.empty()) {
    import_tree(unit, out);
  } else {
    import_file(unit, out);
  }
  return out;
}

}  // namespace tessera::data
