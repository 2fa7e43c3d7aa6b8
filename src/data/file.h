// Files: whole, mapped, and written with every error checked. All failures name the file, and are the user's to mend.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/hash.h"

namespace tessera::data {

std::string read_file(const std::string& path);
void write_file_atomic(const std::string& path, std::string_view bytes);  // beside it first, then renamed over it

// A file's bytes, read-only, paged in when touched.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  const std::byte* data() const { return data_; }
  std::string_view bytes() const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// Appends to a new file and hashes what it appends. `close` must be called: only then is the file complete.
class FileWriter {
 public:
  explicit FileWriter(const std::string& path);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();

  void write(std::string_view bytes);
  void close();  // flushed to the disk
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  Hash128 hash() const { return hasher_.digest(); }

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  std::string buffer_;
  Hasher hasher_;

  void flush();
};

}  // namespace tessera::data
