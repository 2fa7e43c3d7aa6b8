#include "ckpt/directory.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"

namespace tessera::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxManifestBytes = int64_t{4} << 30;
constexpr int64_t kMaxCommitBytes = 4096;
constexpr size_t kStepDigits = 12;
const std::string kStepPrefix = "step-", kTrashPrefix = ".trash-", kTmpSuffix = ".tmp";

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) fail_io("list", directory, error.value());
  std::sort(names.begin(), names.end());
  return names;
}

bool is_committed_tmp(const std::string& root, const std::string& name, int64_t step) {
  return name.ends_with(kTmpSuffix) && path_exists(join(join(root, name), "COMMITTED")) &&
         !path_exists(join(root, step_name(step)));
}

void remove_tree(const std::string& directory) {
  std::error_code error;
  // In this order a directory that is only half deleted can never pass for a checkpoint.
  fs::remove(join(directory, "COMMITTED"), error);
  if (!error) fs::remove(join(directory, "manifest.json"), error);
  if (!error) fs::remove_all(directory, error);
  if (error) fail_io("delete", directory, error.value());
}

void clean_one(const std::string& root, const std::string& name) {
  const std::string path = join(root, name);
  if (name.starts_with(kTrashPrefix + kStepPrefix)) return remove_tree(path);
  const auto step = parse_step(name);
  if (!step || !name.ends_with(kTmpSuffix)) return;
  if (is_committed_tmp(root, name, *step)) {
    bool complete = true;
    try {
      read_complete_manifest(path);
    } catch (const UserError&) {
      complete = false;
    }
    if (complete) {
      rename_path(path, join(root, step_name(*step)));
      return sync_directory(root);
    }
  }
  discard(root, path);
}

}  // namespace

std::string join(const std::string& directory, const std::string& name) {
  return (fs::path(directory) / name).string();
}

std::string step_name(int64_t step) { return fmt::format("{}{:0{}}", kStepPrefix, step, kStepDigits); }

std::optional<int64_t> parse_step(const std::string& name) {
  if (!name.starts_with(kStepPrefix) || name.size() < kStepPrefix.size() + kStepDigits) return std::nullopt;
  const char* begin = name.data() + kStepPrefix.size();
  int64_t step = 0;
  const auto [end, error] = std::from_chars(begin, begin + kStepDigits, step);
  if (error != std::errc{} || end != begin + kStepDigits || step < 0) return std::nullopt;
  const std::string rest(end, name.data() + name.size());
  if (!rest.empty() && !(rest.front() == '.' && rest.ends_with(kTmpSuffix))) return std::nullopt;
  return step;
}

std::string commit_line(const std::string& manifest_text, int64_t step) {
  return fmt::format("v1 {} {} {}\n", hash_hex(manifest_text), manifest_text.size(), step);
}

Manifest read_manifest(const std::string& directory) {
  if (!is_directory(directory)) fail_user("{} is no directory; name a checkpoint such as .../step-N", directory);
  const std::string commit_path = join(directory, "COMMITTED"), manifest_path = join(directory, "manifest.json");
  if (!path_exists(commit_path)) {
    fail_user(
        "{} has no COMMITTED file: it was never completed, or is no checkpoint; use another (`tessera ckpt list`)",
        directory);
  }
  const std::string line = read_file(commit_path, kMaxCommitBytes);
  const std::string text = read_file(manifest_path, kMaxManifestBytes);
  // The hash decides before the text is parsed, so that damage is called damage and not a syntax error.
  if (line.find(hash_hex(text)) == std::string::npos) {
    fail_user(
        "{} has {} bytes with hash {}, which is not what COMMITTED says ({}); it is damaged, use another checkpoint",
        manifest_path, text.size(), hash_hex(text), line.substr(0, line.find('\n')));
  }
  Manifest manifest = parse_manifest(std::as_bytes(std::span(text)), manifest_path);
  if (line != commit_line(text, manifest.step)) {
    fail_user("{} is \"{}\", wanted \"v1 HASH SIZE STEP\" of its manifest; it is damaged, use another checkpoint",
              commit_path, line.substr(0, line.find('\n')));
  }
  return manifest;
}

Manifest read_complete_manifest(const std::string& directory) {
  Manifest manifest = read_manifest(directory);
  const auto named_step = parse_step(fs::path(directory).filename().string());
  if (named_step && *named_step != manifest.step) {
    fail_user("{} holds step {}; it was renamed or mixed up", directory, manifest.step);
  }
  for (const FileRecord& file : manifest.files) {
    const std::string path = join(directory, file.path);
    std::error_code error;
    const auto size = fs::file_size(path, error);
    if (error) fail_user("{} is missing or unreadable ({}); use another checkpoint", path, error.message());
    if (static_cast<int64_t>(size) != file.size) {
      fail_user("{} has {} bytes, wanted {}; it is truncated or damaged, use another checkpoint", path, size,
                file.size);
    }
  }
  return manifest;
}

std::vector<Candidate> find_candidates(const std::string& root) {
  std::vector<Candidate> candidates;
  for (const std::string& name : names_in(root)) {
    const auto step = parse_step(name);
    if (!step) continue;
    if (name == step_name(*step) || is_committed_tmp(root, name, *step))
      candidates.push_back({*step, join(root, name)});
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.step < b.step; });
  return candidates;
}

int64_t directory_bytes(const std::string& directory) {
  int64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    std::error_code no_size;
    if (it->is_regular_file(no_size)) {
      const auto size = it->file_size(no_size);
      if (!no_size) bytes += static_cast<int64_t>(size);
    }
  }
  return bytes;
}

void discard(const std::string& root, const std::string& directory) {
  const std::string name = fs::path(directory).filename().string();
  if (name.starts_with(kTrashPrefix)) return remove_tree(directory);
  const std::string trash = join(root, kTrashPrefix + name);
  if (path_exists(trash)) remove_tree(trash);
  rename_path(directory, trash);
  sync_directory(root);
  remove_tree(trash);
}

void clean_leftovers(const std::string& root, std::vector<std::string>& warnings) {
  for (const std::string& name : names_in(root)) {
    try {
      clean_one(root, name);
    } catch (const Error& error) {
      warnings.push_back(error.what());
    }
  }
}

std::vector<std::string> apply_retention(const std::string& root, int64_t keep_last, int64_t keep_every_steps,
                                         int64_t protected_step, std::vector<std::string>& warnings) {
  std::vector<std::string> removed;
  const std::vector<Candidate> candidates = find_candidates(root);
  int64_t valid = 0;
  for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {
    if (valid < keep_last) {
      // Damaged ones among the newest stay for whoever wants to look at them, and are not counted.
      try {
        read_complete_manifest(it->path);
        ++valid;
      } catch (const Error&) {
      }
      continue;
    }
    if (it->step == protected_step || (keep_every_steps > 0 && it->step % keep_every_steps == 0)) continue;
    try {
      discard(root, it->path);
      removed.push_back(it->path);
    } catch (const Error& error) {
      warnings.push_back(error.what());
    }
  }
  return removed;
}

}  // namespace tessera::ckpt
