#include "ckpt/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/file.h"

namespace tessera::ckpt {

struct WriterLock::Held {
  int fd = -1;
  pid_t owner = ::getpid();
  ~Held() {
    if (fd >= 0) ::close(fd);
  }
};

namespace {

std::string holder_text() {
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  return fmt::format("pid {} on {}\n", ::getpid(), host);
}

std::string read_holder(int fd) {
  char text[320] = {};
  const ssize_t n = ::pread(fd, text, sizeof(text) - 1, 0);
  std::string holder(text, n > 0 ? static_cast<size_t>(n) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder.empty() ? "another process" : holder;
}

void lock_file(int fd, const std::string& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail_io("lock", path, errno);
    fail_user(
        "{} is held by {}, which is writing checkpoints there; wait for it, stop it, or give this run another "
        "directory",
        path, read_holder(fd));
  }
  // The name of the holder only serves messages: failing to write it (full disk) is no reason to stop.
  const std::string text = holder_text();
  if (::ftruncate(fd, 0) == 0) [[maybe_unused]]
    const ssize_t n = ::pwrite(fd, text.data(), text.size(), 0);
}

}  // namespace

WriterLock::WriterLock(const std::string& root) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Held>> held_by_root;
  make_directory(root);
  const std::lock_guard guard(mutex);
  std::weak_ptr<Held>& known = held_by_root[std::filesystem::canonical(root).string()];
  held_ = known.lock();
  // A child after fork() inherits this table but not the right to write.
  if (held_ != nullptr && held_->owner == ::getpid()) return;
  const std::string path = (std::filesystem::path(root) / ".lock").string();
  auto fresh = std::make_shared<Held>();
  fresh->fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fresh->fd < 0) fail_io("open", path, errno);
  lock_file(fresh->fd, path);
  held_ = fresh;
  known = fresh;
}

}  // namespace tessera::ckpt
