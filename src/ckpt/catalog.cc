// Finding checkpoints: the cheap checks of a start, without reading tensor data.
#include "ckpt/checkpoint.h"
#include "ckpt/directory.h"

namespace tessera::ckpt {

namespace {

Entry describe(const Candidate& candidate) {
  Entry entry;
  entry.step = candidate.step;
  entry.path = candidate.path;
  entry.bytes = directory_bytes(candidate.path);
  entry.committed = path_exists(join(candidate.path, "COMMITTED"));
  try {
    entry.created_unix_ms = read_complete_manifest(candidate.path).created_unix_ms;
  } catch (const Error& error) {
    entry.problem = error.what();
  }
  return entry;
}

}  // namespace

std::vector<Entry> list(const std::string& root) {
  std::vector<Entry> entries;
  for (const Candidate& candidate : find_candidates(root)) entries.push_back(describe(candidate));
  return entries;
}

std::optional<Entry> newest_valid(const std::string& root, std::vector<Entry>* skipped) {
  const std::vector<Candidate> candidates = find_candidates(root);
  for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {
    Entry entry = describe(*it);
    if (entry.problem.empty()) return entry;
    if (skipped != nullptr) skipped->push_back(std::move(entry));
  }
  return std::nullopt;
}

std::vector<std::string> prune(const std::string& root, int64_t keep_last, int64_t keep_every_steps) {
  if (keep_last < 1) fail_user("{} checkpoints to keep, wanted at least 1", keep_last);
  if (!is_directory(root)) fail_user("{} is no directory of checkpoints; check the path", root);
  const WriterLock lock(root);
  std::vector<std::string> problems;
  clean_leftovers(root, problems);
  auto removed = apply_retention(root, keep_last, keep_every_steps, -1, problems);
  if (!problems.empty()) fail_user("{} of {} deletions failed: {}", problems.size(), root, problems.front());
  return removed;
}

}  // namespace tessera::ckpt
