#include "data/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace tessera::data {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

[[noreturn]] void fail_read(const std::string& path, int error) {
  fail_user("{}: cannot be read ({}); check the path and its permissions", path, std::strerror(error));
}

[[noreturn]] void fail_write(const std::string& path, int error) {
  fail_user("{}: cannot be written ({}); free space or choose another place for the output", path,
            std::strerror(error));
}

struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

int64_t open_size(const std::string& path, int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) fail_read(path, errno);
  if (S_ISDIR(status.st_mode)) fail_read(path, EISDIR);
  return static_cast<int64_t>(status.st_size);
}

}  // namespace

std::string read_file(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.value < 0) fail_read(path, errno);
  std::string bytes(static_cast<size_t>(open_size(path, file.value)), '\0');
  size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t got = ::read(file.value, bytes.data() + at, bytes.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_read(path, errno);
    if (got == 0) break;
    at += static_cast<size_t>(got);
  }
  bytes.resize(at);
  return bytes;
}

void write_file_atomic(const std::string& path, std::string_view bytes) {
  const std::string temporary = fmt::format("{}.tmp-{}", path, ::getpid());
  try {
    FileWriter file(temporary);
    file.write(bytes);
    file.close();
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    fail_write(path, error);
  }
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.value < 0) fail_read(path, errno);
  size_ = open_size(path, file.value);
  if (size_ == 0) return;  // mmap refuses empty ranges
  void* base = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.value, 0);
  if (base == MAP_FAILED) fail_read(path, errno);
  data_ = static_cast<const std::byte*>(base);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_));
}

std::string_view MappedFile::bytes() const {
  return {reinterpret_cast<const char*>(data_), static_cast<size_t>(size_)};
}

FileWriter::FileWriter(const std::string& path)
    : path_(path), descriptor_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) fail_write(path, errno);
  buffer_.reserve(kBufferBytes);
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_),
      buffer_(std::move(other.buffer_)),
      hasher_(std::move(other.hasher_)) {}

FileWriter::~FileWriter() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void FileWriter::write(std::string_view bytes) {
  size_ += static_cast<int64_t>(bytes.size());
  while (!bytes.empty()) {
    const std::string_view part = bytes.substr(0, kBufferBytes - buffer_.size());
    buffer_ += part;
    bytes.remove_prefix(part.size());
    if (buffer_.size() == kBufferBytes) flush();
  }
}

void FileWriter::flush() {
  hasher_.add(buffer_);
  std::string_view left = buffer_;
  while (!left.empty()) {
    const ssize_t wrote = ::write(descriptor_, left.data(), left.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail_write(path_, errno);
    left.remove_prefix(static_cast<size_t>(wrote));
  }
  buffer_.clear();
}

void FileWriter::close() {
  flush();
  if (::fsync(descriptor_) != 0) fail_write(path_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_write(path_, errno);
}

}  // namespace tessera::data
