// Safetensors files: 8 bytes little-endian header length N, N bytes of JSON, then the bytes of the tensors.
//
// A file is checked in full before anything in it is used: N at most 100 MiB and inside the file, JSON without
// duplicate keys, known types, bytes = elements x width without overflow, offsets that tile the data without hole or
// overlap up to the last byte. Every failure is a UserError with the file, what was found and what was wanted.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/file.h"

namespace tessera::ckpt {

struct TensorInfo {
  std::string name;
  DType dtype = DType::none;   // none for F16, which the engine does not compute with: bytes and read_f32 only
  std::string_view stored;     // the format's own name of the type: "F32", "BF16", ...
  std::vector<int64_t> shape;  // empty: a scalar
  int64_t offset = 0;          // from the beginning of the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;              // by offset
  std::map<std::string, std::string> metadata;  // "__metadata__"
  int64_t header_bytes = 0;                     // 8 + N: where the data begin
};

// `file` is the whole file; `path` only names it in errors.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& path);

std::string shape_text(std::span<const int64_t> shape);  // "(4, 8)"

// Converts F32, F64, BF16 and F16 bytes to float, rounding F64 to nearest. `out` has as many elements as the tensor.
void convert_to_f32(const TensorInfo& tensor, const std::byte* data, std::span<float> out);

// One mapped file. Tensor bytes are read from the disk when touched; they need not be aligned to their type.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const TensorInfo* find(std::string_view name) const;  // null: not in this file
  const TensorInfo& at(std::string_view name) const;    // UserError: not in this file
  const std::byte* data(const TensorInfo& tensor) const { return file_.bytes().data() + tensor.offset; }
  std::vector<float> read_f32(std::string_view name) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string_view, size_t> index_;  // name -> position in header_.tensors
};

}  // namespace tessera::ckpt
