#include "core/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace tessera {

void fail_io(std::string_view action, const std::string& path, int error) {
  const std::string reason = std::generic_category().message(error);
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      fail_user("disk full: cannot {} {} ({}); free space there or choose another directory", action, path, reason);
    case EFBIG: fail_user("file too large: cannot {} {} ({}); raise the limit (`ulimit -f`)", action, path, reason);
    case EACCES:
    case EPERM:
    case EROFS:
      fail_user("no permission: cannot {} {} ({}); give this user access or choose another path", action, path, reason);
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case ENAMETOOLONG: fail_user("cannot {} {} ({}); check the path", action, path, reason);
    default: throw Error(fmt::format("cannot {} {}: {} (errno {})", action, path, reason, error));
  }
}

// Linux moves at most 2 GiB - 4 KiB in one call.
static constexpr int64_t kMaxTransfer = int64_t{1} << 30;

File File::open_read(const std::string& path) {
  // Non-blocking, so that a named pipe is refused instead of waited for; regular files ignore it.
  File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), path);
  if (file.fd_ < 0) fail_io("open", path, errno);
  struct stat info {};
  if (::fstat(file.fd_, &info) != 0) fail_io("inspect", path, errno);
  if (!S_ISREG(info.st_mode)) fail_user("{} is not a regular file; name a file, or check the path", path);
  return file;
}

File File::create(const std::string& path) {
  File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), path);
  if (file.fd_ < 0) fail_io("create", path, errno);
  return file;
}

File::File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

int64_t File::size() const {
  struct stat info {};
  if (::fstat(fd_, &info) != 0) fail_io("inspect", path_, errno);
  return info.st_size;
}

int64_t File::read_at(void* to, int64_t bytes, int64_t offset) const {
  int64_t done = 0;
  while (done < bytes) {
    const auto piece = static_cast<size_t>(std::min(bytes - done, kMaxTransfer));
    const ssize_t n = ::pread(fd_, static_cast<std::byte*>(to) + done, piece, offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("read", path_, errno);
    if (n == 0) break;
    done += n;
  }
  return done;
}

void File::write(const void* from, int64_t bytes) {
  int64_t done = 0;
  while (done < bytes) {
    const auto piece = static_cast<size_t>(std::min(bytes - done, kMaxTransfer));
    const ssize_t n = ::write(fd_, static_cast<const std::byte*>(from) + done, piece);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("write", path_, errno);
    done += n;
  }
}

void File::sync() {
  // Never tried again: after a failure the kernel drops the pages, and a second call would report success.
  if (::fsync(fd_) != 0) fail_io("sync", path_, errno);
}

void File::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail_io("close", path_, errno);
}

FileWriter::FileWriter(const std::string& path) : file_(File::create(path)) { pending_.reserve(kPieceBytes); }

void FileWriter::write(std::string_view bytes) {
  if (static_cast<int64_t>(pending_.size() + bytes.size()) > kPieceBytes) flush();
  if (static_cast<int64_t>(bytes.size()) >= kPieceBytes / 4) {
    flush();
    file_.write(bytes.data(), static_cast<int64_t>(bytes.size()));
  } else {
    pending_.insert(pending_.end(), bytes.begin(), bytes.end());
  }
  size_ += static_cast<int64_t>(bytes.size());
}

void FileWriter::flush() {
  file_.write(pending_.data(), static_cast<int64_t>(pending_.size()));
  pending_.clear();
}

void FileWriter::close() {
  flush();
  file_.sync();
  file_.close();
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const File file = File::open_read(path);
  size_ = file.size();
  if (size_ == 0) return;  // an empty mapping is an error to the system
  void* mapped = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_PRIVATE, file.fd(), 0);
  if (mapped == MAP_FAILED) fail_io("map", path, errno);
  data_ = static_cast<const std::byte*>(mapped);
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

std::string read_file(const std::string& path, int64_t limit_bytes) {
  const File file = File::open_read(path);
  const int64_t size = file.size();
  if (size > limit_bytes) {
    fail_user("{} has {} bytes, at most {} expected; the file is damaged or not what its name says", path, size,
              limit_bytes);
  }
  std::string bytes(static_cast<size_t>(size), '\0');
  bytes.resize(static_cast<size_t>(file.read_at(bytes.data(), size, 0)));
  return bytes;
}

void write_file_synced(const std::string& path, std::string_view bytes) {
  File file = File::create(path);
  file.write(bytes.data(), static_cast<int64_t>(bytes.size()));
  file.sync();
  file.close();
}

void write_file_atomic(const std::string& path, std::string_view bytes) {
  const std::string temporary = path + ".tmp";  // one name: what a killed process left is written over
  try {
    write_file_synced(temporary, bytes);
    rename_path(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  const std::string directory = std::filesystem::path(path).parent_path().string();
  sync_directory(directory.empty() ? "." : directory);
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io("open", path, errno);
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  // Some network file systems cannot sync a directory and say EINVAL; their metadata is synchronous.
  if (error != 0 && error != EINVAL) fail_io("sync", path, error);
}

void make_directory(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail_io("create directory", path, error.value());
}

void rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_io("rename to " + to + " from", from, errno);
}

bool exchange_paths(const std::string& a, const std::string& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP || errno == EXDEV) return false;
  fail_io("exchange with " + b + " the directory", a, errno);
}

bool path_exists(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

bool is_directory(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

}  // namespace tessera
