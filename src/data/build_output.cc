#include "data/build_output.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>

#include "core/error.h"
#include "data/build_record.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPartial = ".partial-";

std::string without_trailing_slash(const std::string& path) {
  std::string normal = fs::path(path).lexically_normal().string();
  while (normal.size() > 1 && normal.ends_with('/')) normal.pop_back();
  return normal;
}

void rename_directory(const std::string& from, const std::string& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) fail_user("{}: cannot be renamed to {} ({}); check permissions", from, to, error.message());
}

}  // namespace

void check_output_outside(const std::string& out, const std::string& input) {
  std::error_code error;
  if (!fs::is_directory(input, error)) return;
  // Absolute first: weakly_canonical leaves a relative path whose first part is not there as it is.
  const fs::path from = fs::weakly_canonical(fs::absolute(out), error);
  const fs::path inside = from.lexically_relative(fs::weakly_canonical(fs::absolute(input), error));
  if (!inside.empty() && *inside.begin() != "..") {
    fail_user("output {} lies inside the input directory {}, whose files it would join; choose a place outside", out,
              input);
  }
}

OutputDirectory::OutputDirectory(const std::string& path)
    : path_(without_trailing_slash(path)), partial_(fmt::format("{}{}{}", path_, kPartial, ::getpid())) {}

OutputDirectory::~OutputDirectory() {
  std::error_code ignored;
  if (begun_) fs::remove_all(partial_, ignored);
}

bool OutputDirectory::exists() const {
  std::error_code error;
  return fs::exists(path_, error) && !(fs::is_directory(path_, error) && fs::is_empty(path_, error));
}

BuildSummary OutputDirectory::record(bool replace) const {
  const std::string file = path_ + "/build.json";
  std::error_code error;
  if (!fs::exists(file, error)) {
    fail_user("{}: exists and is not the output of a data build (no build.json){}; choose another output", path_,
              replace ? ", so it is not replaced" : "");
  }
  return read_build_record(file);
}

// A killed build leaves its partial directory; the process number in its name says whether that build still runs.
void OutputDirectory::remove_abandoned() const {
  const fs::path parent = fs::path(path_).has_parent_path() ? fs::path(path_).parent_path() : fs::path(".");
  const std::string prefix = fs::path(path_).filename().string() + kPartial;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(parent, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(prefix)) continue;
    int process = 0;
    const auto parsed = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), process);
    if (parsed.ec != std::errc() || process <= 0 || process == ::getpid()) continue;
    if (::kill(process, 0) != 0 && errno == ESRCH) fs::remove_all(entry.path(), error);
  }
}

const std::string& OutputDirectory::begin() {
  remove_abandoned();
  std::error_code error;
  fs::remove_all(partial_, error);
  fs::create_directories(partial_, error);
  if (error) fail_user("{}: cannot be made ({}); choose another place for the output", partial_, error.message());
  begun_ = true;
  return partial_;
}

void OutputDirectory::commit() {
  if (exists()) {
    const std::string old = fmt::format("{}.replaced-{}", path_, ::getpid());
    rename_directory(path_, old);
    rename_directory(partial_, path_);
    std::error_code ignored;
    fs::remove_all(old, ignored);
  } else {
    rename_directory(partial_, path_);
  }
  begun_ = false;
}

}  // namespace tessera::data
