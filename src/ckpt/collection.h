// A set of named tensors in one or more safetensors files, as published models come: one file; an index
// (`model.safetensors.index.json`: {"weight_map": {tensor: file}}) with its shards; or a directory that holds either,
// or simply files whose tensors have different names.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ckpt/safetensors.h"

namespace tessera::ckpt {

class Collection {
 public:
  const std::vector<SafetensorsFile>& files() const { return files_; }
  const std::vector<std::string>& names() const { return names_; }  // ascending
  const TensorInfo* find(std::string_view name) const;              // null: not there
  const TensorInfo& at(std::string_view name) const;                // UserError: not there
  const std::byte* data(std::string_view name) const;
  std::vector<float> read_f32(std::string_view name) const;

 private:
  friend Collection open_collection(const std::string& path);
  void open_index(const std::string& path);
  void open_files(const std::vector<std::string>& paths);
  void add(const std::string& name, size_t file);
  const SafetensorsFile& file_of(std::string_view name) const;

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> names_;
  std::map<std::string, size_t, std::less<>> file_by_name_;
};

Collection open_collection(const std::string& path);

}  // namespace tessera::ckpt
