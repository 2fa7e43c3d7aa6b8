#include "ckpt/collection.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ckpt/strict_json.h"

namespace tessera::ckpt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMaxIndexBytes = int64_t{1} << 30;

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name.find('\0') == std::string::npos && name != "." &&
         name != "..";
}

std::vector<std::string> paths_ending(const std::string& directory, std::string_view ending) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.size() >= ending.size() && name.compare(name.size() - ending.size(), ending.size(), ending) == 0) {
      paths.push_back(it->path().string());
    }
  }
  if (error) fail_io("list", directory, error.value());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

Collection open_collection(const std::string& path) {
  Collection collection;
  collection.path_ = path;
  if (!is_directory(path)) {
    if (path.ends_with(".json")) {
      collection.open_index(path);
    } else {
      collection.open_files({path});
    }
    return collection;
  }
  const auto indices = paths_ending(path, ".safetensors.index.json");
  if (indices.size() > 1) fail_user("{} holds {} index files; name the one to read", path, indices.size());
  if (indices.size() == 1) {
    collection.open_index(indices.front());
    return collection;
  }
  const auto files = paths_ending(path, ".safetensors");
  if (files.empty()) fail_user("{} holds no *.safetensors and no *.safetensors.index.json; check the path", path);
  collection.open_files(files);
  return collection;
}

void Collection::open_index(const std::string& path) {
  const nlohmann::json root = parse_json_object(read_file(path, kMaxIndexBytes), path);
  const nlohmann::json& map = member(root, "weight_map", path);
  if (!map.is_object()) fail_user("{}: weight_map is of type {}, wanted an object", path, map.type_name());
  std::map<std::string, size_t> opened;
  for (const auto& item : map.items()) {
    const std::string file = as_text(item.value(), fmt::format("{}: file of tensor \"{}\"", path, item.key()));
    if (!is_plain_file_name(file)) {
      fail_user("{}: tensor \"{}\" is mapped to \"{}\", wanted the name of a file beside the index", path, item.key(),
                file);
    }
    const auto [known, is_new] = opened.try_emplace(file, files_.size());
    if (is_new) files_.emplace_back((fs::path(path).parent_path() / file).string());
    if (files_[known->second].find(item.key()) == nullptr) {
      fail_user("{} says that tensor \"{}\" is in {}, but it is not there; shards and index are of different versions",
                path, item.key(), file);
    }
    add(item.key(), known->second);
  }
}

void Collection::open_files(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    files_.emplace_back(path);
    for (const TensorInfo& tensor : files_.back().tensors()) add(tensor.name, files_.size() - 1);
  }
  std::sort(names_.begin(), names_.end());
}

void Collection::add(const std::string& name, size_t file) {
  const auto [known, is_new] = file_by_name_.emplace(name, file);
  if (!is_new) {
    fail_user("tensor \"{}\" is in both {} and {}; keep one, or add an index file", name, files_[known->second].path(),
              files_[file].path());
  }
  names_.push_back(name);
}

const SafetensorsFile& Collection::file_of(std::string_view name) const {
  const auto found = file_by_name_.find(name);
  if (found == file_by_name_.end()) {
    fail_user("{}: no tensor \"{}\" among its {}; check the name or the model", path_, name, names_.size());
  }
  return files_[found->second];
}

const TensorInfo* Collection::find(std::string_view name) const {
  const auto found = file_by_name_.find(name);
  return found == file_by_name_.end() ? nullptr : files_[found->second].find(name);
}

const TensorInfo& Collection::at(std::string_view name) const { return file_of(name).at(name); }

const std::byte* Collection::data(std::string_view name) const {
  const SafetensorsFile& file = file_of(name);
  return file.data(file.at(name));
}

std::vector<float> Collection::read_f32(std::string_view name) const { return file_of(name).read_f32(name); }

}  // namespace tessera::ckpt
