// A process of several that is killed: all end, one message names it, and the run goes on from its newest checkpoint on
// fewer processes.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "ckpt/checkpoint.h"
#include "core/philox.h"
#include "support.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kDeadline{60};  // of the run, for all to end
constexpr std::chrono::seconds kLong{300};     // for a machine that others use

template <class F>
bool becomes_true(std::chrono::seconds within, F&& condition) {
  for (const auto end = Clock::now() + within; Clock::now() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

int64_t last_step(const std::string& metrics) {
  std::istringstream rows(read_file(metrics));
  int64_t step = -1;
  for (std::string line; std::getline(rows, line);) {
    const auto row = nlohmann::json::parse(line, nullptr, false);
    if (row.is_object() && row.contains("loss")) step = row.at("step");
  }
  return step;
}

// Rank -> process, of those that this mpirun started.
std::map<int, pid_t> ranks_of(pid_t mpirun) {
  std::map<int, pid_t> ranks;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string stat = read_file(entry.path() / "stat");
    std::istringstream after_name(stat.substr(std::min(stat.size(), stat.rfind(')') + 1)));
    std::string state;
    pid_t parent = 0;
    after_name >> state >> parent;
    if (parent != mpirun) continue;
    const std::string environment = read_file(entry.path() / "environ"), key = "OMPI_COMM_WORLD_RANK=";
    if (const size_t at = environment.find(key); at != std::string::npos) {
      ranks[std::atoi(environment.c_str() + at + key.size())] = std::stoi(name);
    }
  }
  return ranks;
}

std::vector<std::string> train_command(const TemporaryDirectory& dir, const std::vector<std::string>& more) {
  std::vector<std::string> command = {TESSERA_BINARY, "train", dir.path("run.toml"), "--json"};
  const std::vector<std::pair<std::string, std::string>> keys = {
      {"checkpoint.every", "2"},
      {"train.micro_tokens", "256"},
      {"eval.every", "0"},
      {"optim.warmup_steps", "0"},
      {"optim.schedule", "constant"},
      {"parallel.deadline_seconds", fmt::to_string(kDeadline.count())}};
  for (const auto& [key, value] : keys) command.insert(command.end(), {"--" + key, value});
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

// Trains as far as `steps`, and says from which checkpoint.
int64_t resume(const TemporaryDirectory& dir, int processes, int64_t steps, const std::vector<std::string>& layout) {
  std::vector<std::string> more = layout;
  more.insert(more.end(), {"--train.steps", fmt::to_string(steps)});
  const std::vector<std::string> command = train_command(dir, more);
  const Outcome o = run_program(processes == 1 ? command : mpirun_command(processes, command));
  EXPECT_EQ(o.exit_code, 0) << o.err;
  const auto result = nlohmann::json::parse(o.out, nullptr, false);
  if (!result.is_object()) return -1;
  EXPECT_EQ(result.at("step"), steps);
  return result.at("resumed_from");
}

int64_t newest_step(const TemporaryDirectory& dir) {
  const auto newest = ckpt::newest_valid(dir.path("run/checkpoints"));
  return newest ? newest->step : -1;
}

size_t count(const std::string& text, const std::string& wanted) {
  size_t n = 0;
  for (size_t at = text.find(wanted); at != std::string::npos; at = text.find(wanted, at + 1)) ++n;
  return n;
}

TEST(Kill, OneOfFourAndTheRunGoesOnWithFewer) {
  if (const std::string why = why_no_mpi(); !why.empty()) GTEST_SKIP() << why;
  const TemporaryDirectory dir;
  write_small_run(dir, 100000);
  const Philox random(1, Purpose::test);
  for (uint64_t time = 0; time < 5; ++time) {
    const int victim = static_cast<int>(random.bits(2 * time) % 4);
    const int64_t begin = newest_step(dir),
                  at = std::max<int64_t>(begin, 0) + 2 + int64_t(random.bits(2 * time + 1) % 8);
    SCOPED_TRACE(fmt::format("rank {} after step {}", victim, at));
    const std::string err = dir.path("err");
    const pid_t mpirun =
        start_program(mpirun_command(4, train_command(dir, {"--parallel.data", "4", "--parallel.expert", "2"})),
                      dir.path("out"), err);
    const bool came_so_far = becomes_true(kLong, [&] { return last_step(dir.path("run/metrics.jsonl")) >= at; });
    const std::map<int, pid_t> ranks = ranks_of(mpirun);
    kill(came_so_far && ranks.contains(victim) ? ranks.at(victim) : mpirun, SIGKILL);
    int status = 0;
    const bool ended = becomes_true(kDeadline, [&] { return waitpid(mpirun, &status, WNOHANG) == mpirun; });
    if (!ended) kill(mpirun, SIGKILL);
    ASSERT_TRUE(came_so_far && ended) << read_file(err);
    ASSERT_EQ(ranks.size(), 4u);
    EXPECT_NE(status, 0);
    for (const auto& [rank, pid] : ranks) {
      EXPECT_TRUE(becomes_true(kDeadline, [pid = pid] { return kill(pid, 0) != 0; }))
          << "rank " << rank << " is still there";
    }
    const std::string said = read_file(err);
    EXPECT_EQ(count(said, "process rank"), 1u) << said;
    EXPECT_EQ(count(said, fmt::format("process rank {} with PID", victim)), 1u) << said;
    EXPECT_EQ(count(said, "tessera: "), 0u) << said;

    // Whatever was being written, what is committed is whole; two processes go on from there, in turn cut along the
    // sequence, and then one.
    const int64_t newest = newest_step(dir);
    EXPECT_GE(newest, begin);
    const std::vector<std::string> of_two =
        time % 2 == 0 ? std::vector<std::string>{"--parallel.data", "2", "--parallel.expert", "2"}
                      : std::vector<std::string>{"--parallel.context", "2"};
    EXPECT_EQ(resume(dir, 2, newest + 1, of_two), newest);
    EXPECT_EQ(resume(dir, 1, newest + 2, {}), newest + 1);
    EXPECT_TRUE(ckpt::verify(ckpt::newest_valid(dir.path("run/checkpoints"))->path).pass);
  }
}

}  // namespace
}  // namespace tessera::test
