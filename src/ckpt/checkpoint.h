// Checkpoints that belong to no layout: logical tensor names, safetensors payload, a manifest with the hash of every
// byte, and a commit that is one rename.
//
//   <root>/LATEST                               name of the newest directory; a hint for people, never read here
//   <root>/.lock                                the writer (lock.h)
//   <root>/step-000000012000/manifest.json      canonical JSON (manifest.h)
//                           /COMMITTED          "v1 <xxh3-128 of manifest.json> <its size> <step>\n", written last
//                           /data/part-000.safetensors ...
//   <root>/step-000000013000.tmp/               being written; with COMMITTED inside: complete, only the rename is
//   missing <root>/.trash-step-.../                     being deleted
//
// Files are synced, then their directories, then COMMITTED, then the directory gets its final name. Killed at any
// point, the root holds the old set or the old set and a complete new checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/lock.h"
#include "ckpt/manifest.h"
#include "ckpt/safetensors_writer.h"
#include "core/file.h"

namespace tessera::ckpt {

struct CheckpointState {
  int64_t step = 0;
  std::string run_id;
  int attempt = 0;
  std::string model_fingerprint;
  std::string tokenizer_fingerprint;
  std::string state_json = "{}";   // schedule, loader, rng, ...: a JSON object, integers of at most 64 bits
  std::vector<TensorRef> tensors;  // unique names, in any order
};

struct SaveOptions {
  int64_t file_bytes = int64_t{4} << 30;  // a payload file is closed before it would grow beyond this
  int64_t keep_last = 3;                  // at least 1
  int64_t keep_every_steps = 0;           // multiples of it are kept for ever; 0: none
};

struct SaveReport {
  std::string path;
  int64_t bytes = 0;
  std::vector<std::string> removed;   // by retention
  std::vector<std::string> warnings;  // the checkpoint is durable, but something old could not be deleted
};

// Views must not change during the call. On failure nothing is left behind and older checkpoints are as they were.
SaveReport save(const std::string& root, const CheckpointState& state, const SaveOptions& options = {});

struct Entry {
  int64_t step = 0;
  std::string path;
  int64_t bytes = 0;  // of all its files
  bool committed = false;
  int64_t created_unix_ms = 0;
  std::string problem;  // empty: commit mark, manifest and file sizes are right
};

std::vector<Entry> list(const std::string& root);  // ascending steps; a missing root has none
// The newest without a problem; newer ones that have one are added to `skipped` (may be null).
std::optional<Entry> newest_valid(const std::string& root, std::vector<Entry>* skipped = nullptr);
// Retention alone: deletes what `save` would delete after `step`, or after the newest valid one. Returns the paths.
std::vector<std::string> prune(const std::string& root, int64_t keep_last, int64_t keep_every_steps);

// An open checkpoint. Its files stay readable even if retention deletes it meanwhile. Reads are safe from any thread.
class Reader {
 public:
  explicit Reader(const std::string& path);  // UserError: no checkpoint, not committed, damaged manifest, wrong sizes

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // UserError when it was written by another model or tokenizer; an empty wish is not compared.
  void require_fingerprints(std::string_view model, std::string_view tokenizer) const;
  bool holds(const TensorRef& wanted) const;  // a tensor of that name, type and shape
  // Type, shape and hash must be right; on a wrong hash the destination holds garbage and the call throws.
  void read_into(std::string_view name, const View& destination) const;
  // Reads every byte of the tensor and says what is wrong with it; empty: nothing.
  std::string check(const TensorRecord& tensor) const;
  std::string check_header(const FileRecord& file) const;

 private:
  friend void load_all(const Reader&, std::span<const TensorRef>, bool);
  std::string fetch(const TensorRecord& tensor, const View& destination) const;
  const File& file_of(const TensorRecord& tensor) const { return files_[static_cast<size_t>(tensor.file)]; }

  std::string path_;
  Manifest manifest_;
  std::vector<File> files_;
};

Reader open(const std::string& path);

// Fills every wanted tensor. First compares names, types and shapes: all that is missing, extra or wrong comes in one
// UserError and nothing is loaded. `allow_extra`: the checkpoint may hold more (weights without optimizer state).
void load_all(const Reader& reader, std::span<const TensorRef> wanted, bool allow_extra = false);

struct Verification {
  struct Bad {
    std::string tensor;  // empty: the damage is outside the tensors, `why` names the file
    std::string why;
  };
  bool pass = false;
  int64_t step = -1;
  int64_t tensors = 0;
  std::vector<Bad> bad;
};
Verification verify(const std::string& path);  // every byte

struct Inspection {
  std::string path;
  int64_t bytes = 0;         // of all its files
  int64_t tensor_bytes = 0;  // of tensor data
  Manifest manifest;
};
Inspection inspect(const std::string& path);

}  // namespace tessera::ckpt
