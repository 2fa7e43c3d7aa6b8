// The walk over inputs: which files there are, and what kind each one is.
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>

#include "core/error.h"
#include "data/importers.h"
#include "data/jsonl.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kJsonlRangeBytes = 8 << 20;

constexpr std::array<std::string_view, 5> kKindNames{"auto", "text", "html", "jsonl", "source"};
constexpr std::string_view kHtmlExtensions[] = {".htm", ".html", ".xhtml"};
constexpr std::string_view kJsonlExtensions[] = {".jsonl", ".ndjson"};
constexpr std::string_view kSourceExtensions[] = {
    ".S",   ".asm", ".bash",  ".c",   ".cc", ".clj", ".cmake", ".cpp", ".cs",  ".cu",  ".cuh",   ".cxx", ".erl", ".ex",
    ".exs", ".f90", ".fs",    ".go",  ".h",  ".hh",  ".hpp",   ".hs",  ".hxx", ".inl", ".java",  ".jl",  ".js",  ".jsx",
    ".kt",  ".lua", ".m",     ".mjs", ".ml", ".mli", ".mm",    ".php", ".pl",  ".pm",  ".proto", ".py",  ".r",   ".rb",
    ".rs",  ".s",   ".scala", ".scm", ".sh", ".sql", ".swift", ".tcl", ".ts",  ".tsx", ".v",     ".vhd", ".zig",
};
constexpr std::string_view kSourceNames[] = {"CMakeLists.txt", "Dockerfile", "Makefile"};

bool among(std::string_view name, std::span<const std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_source(const fs::path& path) {
  return among(path.extension().string(), kSourceExtensions) || among(path.filename().string(), kSourceNames);
}

Kind kind_by_name(const fs::path& path) {
  const std::string extension = path.extension().string();
  if (among(extension, kHtmlExtensions)) return Kind::html;
  if (among(extension, kJsonlExtensions)) return Kind::jsonl;
  return is_source(path) ? Kind::source : Kind::text;
}

struct stat status_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_user("{}: no such file or directory; check the path of the input", path);
  return status;
}

void add_file(const Input& input, const std::string& path, const std::string& name, bool named,
              std::vector<Unit>& units) {
  const struct stat status = status_of(path);
  Unit unit;
  unit.kind = input.kind == Kind::automatic ? kind_by_name(path) : input.kind;
  unit.path = path;
  unit.name = name;
  unit.text_field = input.text_field;
  unit.bytes = static_cast<int64_t>(status.st_size);
  unit.modified_ns = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  unit.named = named;
  if (unit.kind != Kind::jsonl) return units.push_back(std::move(unit));
  for (const auto& [begin, bytes] : line_ranges(path, kJsonlRangeBytes)) {
    unit.begin = begin;
    unit.bytes = bytes;
    units.push_back(unit);
  }
}

// Paths of the regular files below `root`, relative to it, sorted byte by byte.
std::vector<std::string> walk(const std::string& root, ImportSummary& summary) {
  std::vector<std::string> names;
  try {
    const auto options = fs::directory_options::skip_permission_denied;
    for (auto entry = fs::recursive_directory_iterator(root, options); entry != fs::end(entry); ++entry) {
      const std::string name = entry->path().lexically_relative(root).generic_string();
      if (entry->path().filename().string().starts_with('.')) {
        summary.drop("hidden", name);
        entry.disable_recursion_pending();
      } else if (entry->is_symlink()) {
        summary.drop("symbolic link", name);
      } else if (entry->is_regular_file()) {
        names.push_back(name);
      }
    }
  } catch (const fs::filesystem_error& error) {
    fail_user("{}: cannot be listed ({}); check its permissions", root, error.code().message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Whether a file of a directory belongs to an input of this kind.
bool wanted(Kind kind, const std::string& name) {
  switch (kind) {
    case Kind::automatic: return true;
    case Kind::source: return is_source(name);
    case Kind::text: return kind_by_name(name) == Kind::text;
    case Kind::html: return kind_by_name(name) == Kind::html;
    case Kind::jsonl: return kind_by_name(name) == Kind::jsonl;
  }
  return false;
}

Unit whole_tree(const Input& input, std::vector<std::string> names) {
  Unit unit;
  unit.kind = Kind::source;
  unit.path = input.path;
  unit.name = fs::path(input.path).lexically_normal().filename().string();
  if (unit.name.empty()) unit.name = input.path;
  for (const std::string& name : names) {
    const struct stat status = status_of(input.path + "/" + name);
    unit.bytes += static_cast<int64_t>(status.st_size);
    unit.modified_ns =
        std::max(unit.modified_ns, int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec);
  }
  unit.files = std::move(names);
  return unit;
}

}  // namespace

Kind parse_kind(std::string_view name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (kKindNames[i] == name) return static_cast<Kind>(i);
  }
  fail_user("input kind \"{}\"; wanted one of auto, text, html, jsonl, source", name);
}

std::string_view name_of(Kind kind) { return kKindNames[static_cast<size_t>(kind)]; }

std::vector<Unit> list_units(const Input& input, ImportSummary& summary) {
  const bool directory = S_ISDIR(status_of(input.path).st_mode);
  if (input.one_document && (!directory || input.kind != Kind::source)) {
    fail_user("{}: one_document is for directories of kind \"source\"; found a {} of kind \"{}\"", input.path,
              directory ? "directory" : "file", name_of(input.kind));
  }
  std::vector<Unit> units;
  if (!directory) {
    ++summary.files;
    add_file(input, input.path, fs::path(input.path).filename().string(), true, units);
    return units;
  }
  std::vector<std::string> names;
  for (std::string& name : walk(input.path, summary)) {
    ++summary.files;
    if (wanted(input.kind, name)) {
      names.push_back(std::move(name));
    } else {
      summary.drop(fmt::format("not of kind {}", name_of(input.kind)), name);
    }
  }
  if (input.one_document) {
    if (!names.empty()) units.push_back(whole_tree(input, std::move(names)));
    return units;
  }
  for (const std::string& name : names) add_file(input, input.path + "/" + name, name, false, units);
  return units;
}

}  // namespace tessera::data
