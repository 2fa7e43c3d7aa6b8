// Files with every call checked. What a user can mend (full disk, missing file, missing permission, size limit) is a
// UserError that says how; anything else the system reports is an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

inline std::string_view text_of(const std::byte* data, int64_t bytes) {
  return {reinterpret_cast<const char*>(data), static_cast<size_t>(bytes)};
}

// Throws for the errno `error` of `action` ("open", "write", ...) on `path`.
[[noreturn]] void fail_io(std::string_view action, const std::string& path, int error);

// A descriptor that closes itself.
class File {
 public:
  static File open_read(const std::string& path);  // regular files only
  static File create(const std::string& path);     // emptied if it exists
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  int64_t size() const;
  // Reads until `bytes` are there or the file ends; returns how many were read. Safe from several threads at once.
  int64_t read_at(void* to, int64_t bytes, int64_t offset) const;
  void write(const void* from, int64_t bytes);
  void sync();
  void close();  // late write errors of network file systems show here

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_;
};

// Writes a new file as a stream: small pieces are gathered to large writes. Complete only after `close`.
class FileWriter {
 public:
  // Large enough for parallel file systems, small enough that a hashed piece is still in the cache when it is written.
  static constexpr int64_t kPieceBytes = int64_t{4} << 20;

  explicit FileWriter(const std::string& path);

  void write(std::string_view bytes);
  void close();  // flushed to the disk
  const std::string& path() const { return file_.path(); }
  int64_t size() const { return size_; }  // of what was written so far

 private:
  void flush();
  File file_;
  int64_t size_ = 0;
  std::vector<char> pending_;
};

// A whole file in memory, read-only; pages are read when touched.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  std::string_view text() const { return text_of(data_, size_); }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// UserError when it is larger than `limit_bytes`: a damaged or mistaken file must not fill the memory.
std::string read_file(const std::string& path, int64_t limit_bytes = std::numeric_limits<int64_t>::max());
void write_file_synced(const std::string& path, std::string_view bytes);
// Written beside, then renamed: the name appears with all its bytes, durably, or not at all.
void write_file_atomic(const std::string& path, std::string_view bytes);
void sync_directory(const std::string& path);  // makes the names in it durable
void make_directory(const std::string& path);  // parents too; an existing one is fine
void rename_path(const std::string& from, const std::string& to);
bool exchange_paths(const std::string& a, const std::string& b);  // in one step; false: this file system cannot
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);

}  // namespace tessera
