#include "data/jsonl.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"

namespace tessera::data {
namespace {

using nlohmann::json;

std::string_view without_return(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

bool blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == std::string_view::npos; }

void import_line(const Unit& unit, std::string_view line, int64_t offset, Imported& out) {
  if (blank(line)) return;
  const std::string name = fmt::format("{}:{}", unit.name, offset);
  json object = json::parse(line, nullptr, /*allow_exceptions=*/false);  // refuses what is not UTF-8, too
  if (!object.is_object()) return out.summary.drop("line that is not a JSON object", name);
  const auto field = object.find(unit.text_field);
  if (field == object.end() || !field->is_string()) {
    return out.summary.drop(fmt::format("object without a string \"{}\"", unit.text_field), name);
  }
  std::string& text = field->get_ref<std::string&>();
  if (blank(text)) return out.summary.drop("empty", name);
  ++out.summary.documents;
  out.documents.push_back({name, std::move(text), {}, 0, static_cast<uint32_t>(hash_of(unit.path).low)});
}

}  // namespace

std::vector<std::pair<int64_t, int64_t>> line_ranges(const std::string& path, int64_t target_bytes) {
  const MappedFile file(path);
  const std::string_view text = file.text();
  std::vector<std::pair<int64_t, int64_t>> ranges;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t newline = text.find('\n', std::min(begin + static_cast<size_t>(target_bytes), text.size()));
    const size_t end = newline == std::string_view::npos ? text.size() : newline + 1;
    ranges.emplace_back(begin, end - begin);
    begin = end;
  }
  if (ranges.empty()) ranges.emplace_back(0, 0);
  return ranges;
}

void import_jsonl(const Unit& unit, Imported& out) {
  const MappedFile file(unit.path);
  TESSERA_CHECK(unit.begin + unit.bytes <= file.size(), "{} became shorter while it was read", unit.path);
  const std::string_view text = file.text().substr(static_cast<size_t>(unit.begin), static_cast<size_t>(unit.bytes));
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find('\n', at), text.size());
    import_line(unit, without_return(text.substr(at, end - at)), unit.begin + static_cast<int64_t>(at), out);
    at = end + 1;
  }
  if (unit.bytes == 0) out.summary.drop("empty", unit.name);
}

}  // namespace tessera::data
