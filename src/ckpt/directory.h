// Names in a directory of checkpoints, what counts as one, and how one is taken away. Private to ckpt.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ckpt/manifest.h"

namespace tessera::ckpt {

std::string join(const std::string& directory, const std::string& name);
std::string step_name(int64_t step);                         // "step-000000000100"
std::optional<int64_t> parse_step(const std::string& name);  // of a final name or of one ending in ".tmp"

std::string commit_line(const std::string& manifest_text, int64_t step);

// Reads COMMITTED and manifest.json and compares them. Throws UserError with the reason when it is no valid checkpoint.
Manifest read_manifest(const std::string& directory);
// Additionally every file must be there with its size.
Manifest read_complete_manifest(const std::string& directory);

struct Candidate {
  int64_t step;
  std::string path;
};
// Directories with a final name, and committed ones whose rename is missing; ascending steps.
std::vector<Candidate> find_candidates(const std::string& root);

int64_t directory_bytes(const std::string& directory);

// Renamed to .trash- first, so that half of a checkpoint never stands under a name that a reader looks at.
void discard(const std::string& root, const std::string& directory);
// What dead writers left: deletes .trash- and unfinished .tmp, and completes the rename of committed ones. The caller
// holds the WriterLock, so no writer of these is alive. Failures become warnings.
void clean_leftovers(const std::string& root, std::vector<std::string>& warnings);

// Deletes all but the newest `keep_last` valid ones, multiples of `keep_every_steps`, and `protected_step`.
std::vector<std::string> apply_retention(const std::string& root, int64_t keep_last, int64_t keep_every_steps,
                                         int64_t protected_step, std::vector<std::string>& warnings);

}  // namespace tessera::ckpt
