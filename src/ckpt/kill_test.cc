// A save killed at any point leaves the old set, or the old set and a complete new checkpoint.
//
// Two ways to choose the point. In order: this binary's own fsync, rename, mkdir, unlink calls stand before libc's and
// raise SIGKILL at the n-th of them, for every n until a save gets through. At random: SIGKILL from outside after a
// random time, which also hits the writes in between.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <chrono>
#include <csignal>
#include <cstdio>

#include "ckpt/checkpoint.h"
#include "ckpt/directory.h"
#include "ckpt/test_support.h"

namespace {
int calls_left = 0;  // 0: nothing is counted
bool exchange_works = true;

void count_down() {
  if (calls_left > 0 && --calls_left == 0) ::raise(SIGKILL);
}
}  // namespace

extern "C" {
int fsync(int fd) {
  count_down();
  return static_cast<int>(::syscall(SYS_fsync, fd));
}
int rename(const char* from, const char* to) noexcept {
  count_down();
  return static_cast<int>(::syscall(SYS_rename, from, to));
}
int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) noexcept {
  count_down();
  if (!exchange_works) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_renameat2, from_fd, from, to_fd, to, flags));
}
int mkdir(const char* path, mode_t mode) noexcept {
  count_down();
  return static_cast<int>(::syscall(SYS_mkdir, path, mode));
}
int unlinkat(int fd, const char* path, int flags) noexcept {
  count_down();
  return static_cast<int>(::syscall(SYS_unlinkat, fd, path, flags));
}
int remove(const char* path) noexcept {
  count_down();
  const auto removed = static_cast<int>(::syscall(SYS_unlink, path));
  return removed == 0 || errno != EISDIR ? removed : static_cast<int>(::syscall(SYS_rmdir, path));
}
}

namespace tessera::ckpt {
namespace {

namespace fs = std::filesystem;
using test::holds_sample;
using test::save_sample;
using test::TempDir;

SaveOptions options_keeping(int64_t keep_last) {
  SaveOptions options;
  options.keep_last = keep_last;
  options.file_bytes = 6000;  // several parts, so that there is more to tear
  return options;
}

void expect_whole(const std::string& root) {
  for (const Entry& entry : list(root)) {
    EXPECT_EQ(entry.problem, "");
    EXPECT_TRUE(verify(entry.path).pass) << entry.path;
  }
}

// Kills `attempt` at its n-th call for n = 1, 2, ... and checks after each; returns how many points there were.
template <class Prepare, class Attempt, class Check>
int kill_at_every_call(Prepare prepare, Attempt attempt, Check check) {
  for (int n = 1;; ++n) {
    const TempDir dir;
    prepare(dir.path());
    const int status = test::run_in_child([&] {
      calls_left = n;
      attempt(dir.path());
      return 0;
    });
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    EXPECT_TRUE(killed || status == 0) << "status " << status << " at call " << n;
    SCOPED_TRACE(fmt::format("killed at call {}", n));
    expect_whole(dir.path());
    check(dir.path());
    EXPECT_TRUE(save_sample(dir.path(), 9, options_keeping(1)).warnings.empty());
    EXPECT_EQ(list(dir.path()).size(), 1u);
    int64_t names = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(dir.path())) ++names;
    EXPECT_EQ(names, 3) << "step-9, LATEST and .lock, and no leftovers";
    if (!killed) return n - 1;
  }
}

TEST(Kill, NewStepWithRetention) {
  const int points = kill_at_every_call(
      [](const std::string& root) {
        save_sample(root, 1, options_keeping(2));
        save_sample(root, 2, options_keeping(2));
      },
      [](const std::string& root) { save_sample(root, 3, options_keeping(2)); },
      [](const std::string& root) {
        const auto newest = newest_valid(root);
        ASSERT_TRUE(newest);
        EXPECT_TRUE(newest->step == 2 || newest->step == 3);
        EXPECT_TRUE(holds_sample(newest->path, newest->step));
        EXPECT_TRUE(verify(join(root, step_name(2))).pass);
      });
  EXPECT_GT(points, 20);
}

void kill_while_replacing_the_only_one() {
  int old_found = 0, new_found = 0;
  kill_at_every_call([](const std::string& root) { save_sample(root, 5, options_keeping(1)); },
                     [](const std::string& root) { save_sample(root, 5, options_keeping(1), 77); },
                     [&](const std::string& root) {
                       const auto newest = newest_valid(root);
                       ASSERT_TRUE(newest);
                       EXPECT_EQ(newest->step, 5);
                       const bool is_new = holds_sample(newest->path, 77);
                       EXPECT_TRUE(is_new || holds_sample(newest->path, 5));
                       (is_new ? new_found : old_found) += 1;
                     });
  EXPECT_GT(old_found, 10);
  EXPECT_GT(new_found, 5);
}

TEST(Kill, SameStepReplaced) { kill_while_replacing_the_only_one(); }

TEST(Kill, SameStepReplacedWhereDirectoriesCannotBeExchanged) {
  exchange_works = false;
  kill_while_replacing_the_only_one();
  exchange_works = true;
}

TEST(Kill, AtRandomTimes) {
  const TempDir dir;
  const Philox random(3, Purpose::test);
  // Times are drawn within a few saves as this machine makes them, however slow it is at the moment.
  const auto begin = std::chrono::steady_clock::now();
  save_sample(dir.path(), 1, options_keeping(2));
  const auto save_time = std::chrono::steady_clock::now() - begin;
  const auto save_us = std::chrono::duration_cast<std::chrono::microseconds>(save_time).count() + 100;
  int64_t durable = 1;  // the last step whose save had returned
  for (uint64_t round = 0; round < 60; ++round) {
    int report[2];
    ASSERT_EQ(pipe(report), 0);
    const int64_t first = durable + 1;
    const pid_t child = fork();
    if (child == 0) {
      for (int64_t step = first;; ++step) {
        save_sample(dir.path(), step, options_keeping(2));
        if (write(report[1], &step, sizeof(step)) != sizeof(step)) _exit(1);
      }
    }
    close(report[1]);
    usleep(static_cast<useconds_t>(random.uniform(round) * 4 * static_cast<double>(save_us)));
    ::kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    int64_t step = 0;
    while (read(report[0], &step, sizeof(step)) == sizeof(step)) durable = step;
    close(report[0]);

    const auto newest = newest_valid(dir.path());
    ASSERT_TRUE(newest);
    EXPECT_GE(newest->step, durable);
    EXPECT_TRUE(holds_sample(newest->path, newest->step));
    expect_whole(dir.path());
  }
}

}  // namespace
}  // namespace tessera::ckpt
