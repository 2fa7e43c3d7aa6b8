#include "ckpt/manifest.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "ckpt/safetensors.h"
#include "ckpt/strict_json.h"
#include "core/hash.h"

namespace tessera::ckpt {

using nlohmann::json;

namespace {

constexpr int64_t kFormat = 1;

DType dtype_named(const std::string& name, const std::string& what) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::i32, DType::i64, DType::u8}) {
    if (name_of(dtype) == name) return dtype;
  }
  fail_user("{} has dtype \"{}\", wanted f32, f64, bf16, i32, i64 or u8", what, name);
}

std::string parse_hash(const json& value, const std::string& what) {
  std::string hash = as_text(value, what);
  if (!is_hash_hex(hash)) fail_user("{} is \"{}\", wanted 32 hexadecimal digits", what, hash);
  return hash;
}

const json& list_at(const json& root, const char* key, const std::string& what) {
  const json& list = root[key];
  if (!list.is_array()) fail_user("{}: {} is of type {}, wanted a list", what, key, list.type_name());
  return list;
}

FileRecord parse_file(const json& entry, const std::string& what) {
  check_keys(entry, {"header_bytes", "header_xxh3", "path", "size"}, what);
  FileRecord file{as_text(entry["path"], what + " path"), as_count(entry["size"], what + " size"),
                  as_count(entry["header_bytes"], what + " header_bytes"),
                  parse_hash(entry["header_xxh3"], what + " header_xxh3")};
  // Only plain names below data/, so that a forged manifest cannot point outside the checkpoint.
  const std::string prefix = "data/";
  const std::string name = file.path.starts_with(prefix) ? file.path.substr(prefix.size()) : "";
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    fail_user("{} has path \"{}\", wanted data/NAME", what, file.path);
  }
  if (file.header_bytes > file.size) {
    fail_user("{} has a header of {} bytes in a file of {}", what, file.header_bytes, file.size);
  }
  return file;
}

TensorRecord parse_tensor(const json& entry, const std::vector<FileRecord>& files, const std::string& where) {
  check_keys(entry, {"bytes", "dtype", "file", "name", "offset", "shape", "xxh3"}, where);
  TensorRecord tensor;
  tensor.name = as_text(entry["name"], where + " name");
  const std::string what = fmt::format("{} \"{}\"", where, tensor.name);
  tensor.dtype = dtype_named(as_text(entry["dtype"], what + " dtype"), what);
  tensor.file = as_count(entry["file"], what + " file");
  tensor.offset = as_count(entry["offset"], what + " offset");
  tensor.bytes = as_count(entry["bytes"], what + " bytes");
  tensor.hash = parse_hash(entry["xxh3"], what + " xxh3");
  if (tensor.file >= static_cast<int64_t>(files.size())) {
    fail_user("{} is in file {} of {}", what, tensor.file, files.size());
  }
  int64_t bytes = bytes_of(tensor.dtype);
  bool overflow = false;
  if (!entry["shape"].is_array()) fail_user("{} shape is of type {}, wanted a list", what, entry["shape"].type_name());
  for (const json& extent : entry["shape"]) {
    tensor.shape.push_back(as_count(extent, what + " extent"));
    overflow |= __builtin_mul_overflow(bytes, tensor.shape.back(), &bytes);
  }
  if (overflow || bytes != tensor.bytes) {
    fail_user("{} has {} bytes, which do not fit {} {}", what, tensor.bytes, name_of(tensor.dtype),
              shape_text(tensor.shape));
  }
  return tensor;
}

void check_unique(const Manifest& manifest, const std::string& what) {
  for (size_t i = 1; i < manifest.tensors.size(); ++i) {
    const std::string &before = manifest.tensors[i - 1].name, &name = manifest.tensors[i].name;
    if (!(before < name))
      fail_user("{}: tensor \"{}\" stands after \"{}\", wanted ascending names", what, name, before);
  }
  std::set<std::string_view> paths;
  for (const FileRecord& file : manifest.files) {
    if (!paths.insert(file.path).second) fail_user("{}: file {} is listed twice", what, file.path);
  }
}

void check_tiling(const Manifest& manifest, const std::string& what) {
  std::vector<const TensorRecord*> by_place;
  for (const TensorRecord& tensor : manifest.tensors) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(), [](const TensorRecord* a, const TensorRecord* b) {
    return std::tie(a->file, a->offset, a->bytes) < std::tie(b->file, b->offset, b->bytes);
  });
  auto next = by_place.begin();
  for (int64_t f = 0; f < static_cast<int64_t>(manifest.files.size()); ++f) {
    const FileRecord& file = manifest.files[static_cast<size_t>(f)];
    int64_t at = file.header_bytes;
    for (; next != by_place.end() && (*next)->file == f; ++next) {
      if ((*next)->offset != at) {
        fail_user("{}: tensor \"{}\" begins at byte {} of {}, wanted {}", what, (*next)->name, (*next)->offset,
                  file.path, at);
      }
      at += (*next)->bytes;  // both below 2^53
      if (at > file.size) break;
    }
    if (at != file.size) fail_user("{}: tensors of {} end at byte {}, the file at {}", what, file.path, at, file.size);
  }
}

}  // namespace

const TensorRecord* Manifest::find(std::string_view name) const {
  const auto found =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const TensorRecord& tensor, std::string_view key) { return tensor.name < key; });
  return found == tensors.end() || found->name != name ? nullptr : &*found;
}

int64_t Manifest::tensor_bytes() const {
  int64_t bytes = 0;
  for (const TensorRecord& tensor : tensors) bytes += tensor.bytes;
  return bytes;
}

std::string to_json(const Manifest& manifest) {
  json files = json::array(), tensors = json::array();
  for (const FileRecord& file : manifest.files) {
    files.push_back({{"header_bytes", file.header_bytes},
                     {"header_xxh3", file.header_hash},
                     {"path", file.path},
                     {"size", file.size}});
  }
  for (const TensorRecord& tensor : manifest.tensors) {
    tensors.push_back({{"bytes", tensor.bytes},
                       {"dtype", name_of(tensor.dtype)},
                       {"file", tensor.file},
                       {"name", tensor.name},
                       {"offset", tensor.offset},
                       {"shape", tensor.shape},
                       {"xxh3", tensor.hash}});
  }
  return dump_canonical({{"attempt", manifest.attempt},
                         {"created_unix_ms", manifest.created_unix_ms},
                         {"files", std::move(files)},
                         {"format", kFormat},
                         {"model_fingerprint", manifest.model_fingerprint},
                         {"run_id", manifest.run_id},
                         {"state", parse_json_object(manifest.state_json, "checkpoint state")},
                         {"step", manifest.step},
                         {"tensors", std::move(tensors)},
                         {"tokenizer_fingerprint", manifest.tokenizer_fingerprint}});
}

Manifest parse_manifest(std::span<const std::byte> text, const std::string& what) {
  const json root = parse_json_object(std::string_view(reinterpret_cast<const char*>(text.data()), text.size()), what);
  const int64_t format = as_count(member(root, "format", what), what + ": format");
  if (format != kFormat) {
    fail_user("{}: format version {}, this program reads {}; use the version of tessera that wrote it", what, format,
              kFormat);
  }
  check_keys(root,
             {"attempt", "created_unix_ms", "files", "format", "model_fingerprint", "run_id", "state", "step",
              "tensors", "tokenizer_fingerprint"},
             what);
  Manifest manifest;
  manifest.step = as_count(root["step"], what + ": step");
  manifest.run_id = as_text(root["run_id"], what + ": run_id");
  const int64_t attempt = as_count(root["attempt"], what + ": attempt");
  if (attempt > std::numeric_limits<int>::max()) fail_user("{}: attempt {} is out of range", what, attempt);
  manifest.attempt = static_cast<int>(attempt);
  manifest.created_unix_ms = as_count(root["created_unix_ms"], what + ": created_unix_ms");
  manifest.model_fingerprint = as_text(root["model_fingerprint"], what + ": model_fingerprint");
  manifest.tokenizer_fingerprint = as_text(root["tokenizer_fingerprint"], what + ": tokenizer_fingerprint");
  if (!root["state"].is_object())
    fail_user("{}: state is of type {}, wanted an object", what, root["state"].type_name());
  manifest.state_json = dump_canonical(root["state"]);
  for (const json& entry : list_at(root, "files", what)) {
    manifest.files.push_back(parse_file(entry, fmt::format("{}: file {}", what, manifest.files.size())));
  }
  for (const json& entry : list_at(root, "tensors", what)) {
    manifest.tensors.push_back(
        parse_tensor(entry, manifest.files, fmt::format("{}: tensor {}", what, manifest.tensors.size())));
  }
  check_unique(manifest, what);
  check_tiling(manifest, what);
  return manifest;
}

}  // namespace tessera::ckpt
