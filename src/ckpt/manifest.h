// manifest.json: what a checkpoint holds, where each tensor lies, and the hash of every byte.
//
// Canonical form: keys sorted, no blanks, tensors by ascending name, so equal contents give equal bytes. Parsing checks
// everything that later code relies on: types, ranges, paths inside the checkpoint, and that the tensors of a file tile
// it from the end of its header to its last byte, so that no byte of it escapes verification.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"

namespace tessera::ckpt {

struct TensorRecord {
  std::string name;
  DType dtype = DType::none;
  std::vector<int64_t> shape;
  int64_t file = 0;    // position in Manifest::files
  int64_t offset = 0;  // from the beginning of the file
  int64_t bytes = 0;
  std::string hash;
};

struct FileRecord {
  std::string path;  // relative to the checkpoint: "data/part-000.safetensors"
  int64_t size = 0;
  int64_t header_bytes = 0;
  std::string header_hash;
};

struct Manifest {
  int64_t step = 0;
  std::string run_id;
  int attempt = 0;
  int64_t created_unix_ms = 0;
  std::string model_fingerprint;
  std::string tokenizer_fingerprint;
  std::string state_json = "{}";  // a JSON object that only the trainer reads
  std::vector<FileRecord> files;
  std::vector<TensorRecord> tensors;  // ascending names

  const TensorRecord* find(std::string_view name) const;  // null: not there
  int64_t tensor_bytes() const;
};

std::string to_json(const Manifest& manifest);
// `what` names the text in errors, usually its path.
Manifest parse_manifest(std::span<const std::byte> text, const std::string& what);

}  // namespace tessera::ckpt
