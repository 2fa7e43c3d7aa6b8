// A run that was interrupted ends with the bits of one that was not, wherever and however it was interrupted.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "ckpt/checkpoint.h"
#include "support.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kSteps = 24;

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// All that a run leaves and that must not depend on interruptions.
struct Final {
  std::vector<std::string> tensors;  // name and hash: weights, optimizer state, balance counters
  std::vector<std::string> metrics;  // rows without "time"
  json data, schedule, guard;
};

Final final_of(const std::string& run_dir) {
  Final final;
  const auto newest = ckpt::newest_valid(run_dir + "/checkpoints");
  if (!newest) return final;
  EXPECT_EQ(newest->step, kSteps);
  EXPECT_TRUE(ckpt::verify(newest->path).pass);
  const ckpt::Manifest manifest = ckpt::inspect(newest->path).manifest;
  for (const auto& t : manifest.tensors) final.tensors.push_back(t.name + " " + t.hash);
  const json state = json::parse(manifest.state_json);
  final.data = state.at("data");
  final.schedule = state.at("schedule");
  final.guard = state.at("guard");
  for (const std::string& line : lines_of(run_dir + "/metrics.jsonl")) {
    json row = json::parse(line);
    row.erase("time");
    final.metrics.push_back(row.dump());
  }
  return final;
}

void expect_same(const Final& got, const Final& want) {
  ASSERT_FALSE(want.tensors.empty());
  EXPECT_EQ(got.tensors, want.tensors);
  EXPECT_EQ(got.metrics, want.metrics);
  EXPECT_EQ(got.data, want.data);
  EXPECT_EQ(got.schedule, want.schedule);
  EXPECT_EQ(got.guard, want.guard);
}

class Resume : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    // Counters that fill over two steps, and a guard in the middle of its window: state that a checkpoint must hold.
    write_small_run(*dir_, kSteps,
                    "[checkpoint]\nevery = 4\nkeep_last = 4\n[guard]\nwindow = 5\ngrace = 5\n"
                    "[balance]\nmin_tokens = 300\n");
    const Outcome run = tessera(arguments("uninterrupted"));
    ASSERT_EQ(run.exit_code, 0) << run.err;
    want_ = new Final(final_of(dir_->path("uninterrupted")));
    for (const char* kind : {"model.", "muon.momentum.", "adam.", "balance."}) {
      ASSERT_TRUE(std::ranges::any_of(want_->tensors, [&](const auto& t) { return t.starts_with(kind); })) << kind;
    }
  }
  static void TearDownTestSuite() {
    delete want_;
    delete dir_;
  }

  static std::vector<std::string> arguments(const std::string& name, std::vector<std::string> more = {}) {
    std::vector<std::string> all{"train", dir_->path("run.toml"), "--run.dir", dir_->path(name)};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  // Runs until metrics.jsonl reaches a step, then sends the signal. The status as waitpid gives it.
  static int interrupt_at(const std::string& name, int64_t step, int signal) {
    const pid_t child = start_tessera(arguments(name));
    const std::string wanted = "{\"step\":" + std::to_string(step) + ",";
    int status = 0;
    while (read_file(dir_->path(name + "/metrics.jsonl")).find(wanted) == std::string::npos) {
      if (waitpid(child, &status, WNOHANG) == child) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(child, signal);
    waitpid(child, &status, 0);
    return status;
  }

  static TemporaryDirectory* dir_;
  static Final* want_;
};

TemporaryDirectory* Resume::dir_ = nullptr;
Final* Resume::want_ = nullptr;

TEST_F(Resume, KilledAgainAndAgain) {
  // Before the first checkpoint, beside one, and between two with an evaluation.
  for (const int64_t step : {0, 2, 4, 11, 15}) {
    const int status = interrupt_at("killed", step, SIGKILL);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "at step " << step << ": status " << status;
  }
  const Outcome end = tessera(arguments("killed"));
  ASSERT_EQ(end.exit_code, 0) << end.err;
  EXPECT_NE(end.out.find("resumed from step"), std::string::npos) << end.out;
  expect_same(final_of(dir_->path("killed")), *want_);
}

TEST_F(Resume, StoppedByASignal) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string name = "stopped" + std::to_string(signal);
    const int status = interrupt_at(name, 6, signal);
    ASSERT_TRUE(WIFEXITED(status)) << status;
    EXPECT_EQ(WEXITSTATUS(status), 0);
    const json last = json::parse(lines_of(dir_->path(name + "/metrics.jsonl")).back());
    const auto saved = ckpt::newest_valid(dir_->path(name + "/checkpoints"));
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->step, last.at("step"));
    EXPECT_LT(saved->step, kSteps);
    const Outcome end = tessera(arguments(name));
    ASSERT_EQ(end.exit_code, 0) << end.err;
    EXPECT_NE(end.out.find("resumed from step " + std::to_string(saved->step)), std::string::npos) << end.out;
    expect_same(final_of(dir_->path(name)), *want_);
  }
}

void flip_bit(const std::string& path, int64_t from_end) {
  std::string bytes = read_file(path);
  bytes[bytes.size() - static_cast<size_t>(from_end)] ^= 1;
  write_file(path, bytes);
}

TEST_F(Resume, DamagedCheckpointsAreSkipped) {
  const Outcome all = tessera(arguments("damaged"));
  ASSERT_EQ(all.exit_code, 0) << all.err;
  const std::string checkpoints = dir_->path("damaged/checkpoints/");
  flip_bit(checkpoints + "step-000000000024/data/part-000.safetensors", 100);
  fs::resize_file(checkpoints + "step-000000000020/data/part-000.safetensors", 5000);
  fs::remove(checkpoints + "step-000000000016/COMMITTED");
  const Outcome again = tessera(arguments("damaged"));
  ASSERT_EQ(again.exit_code, 0) << again.err;
  for (const char* name : {"step-000000000024 is skipped", "step-000000000020 is skipped"}) {
    EXPECT_NE(again.err.find(name), std::string::npos) << again.err;
  }
  EXPECT_NE(again.out.find("resumed from step 12"), std::string::npos) << again.out;
  expect_same(final_of(dir_->path("damaged")), *want_);
}

TEST_F(Resume, NothingValidIsNotANewRun) {
  const Outcome all = tessera(arguments("lost"));
  ASSERT_EQ(all.exit_code, 0) << all.err;
  for (const auto& entry : ckpt::list(dir_->path("lost/checkpoints"))) {
    flip_bit(entry.path + "/data/part-000.safetensors", 100);
  }
  const Outcome again = tessera(arguments("lost"));
  EXPECT_EQ(again.exit_code, 2);
  EXPECT_NE(again.err.find("holds 4 checkpoints and none is valid"), std::string::npos) << again.err;
}

TEST_F(Resume, RecomputeChangesNoBit) {
  for (const char* key : {"--train.recompute_all", "--train.recompute_selective"}) {
    const Outcome run = tessera(arguments(std::string("with") + key, {key, "true"}));
    ASSERT_EQ(run.exit_code, 0) << run.err;
    expect_same(final_of(dir_->path(std::string("with") + key)), *want_);
  }
}

TEST_F(Resume, BalanceOptionsMayChange) {
  for (const auto& change : std::vector<std::vector<std::string>>{
           {"--balance.bins", "64"}, {"--balance.method", "sign"}, {"--balance.width", "0.001"}}) {
    const std::string name = "changed" + change[0] + change[1];
    interrupt_at(name, 5, SIGTERM);  // an odd step: the routers wait for more tokens
    const Outcome end = tessera(arguments(name, change));
    ASSERT_EQ(end.exit_code, 0) << end.err;
    EXPECT_NE(end.out.find("resumed from step"), std::string::npos) << end.out;
    const size_t line = end.err.find("the routers count from zero");
    EXPECT_NE(line, std::string::npos) << end.err;
    EXPECT_EQ(end.err.find("the routers count from zero", line + 1), std::string::npos) << "once:\n" << end.err;
  }
}

TEST_F(Resume, FinishedRunDoesNothing) {
  const std::string before = read_file(dir_->path("uninterrupted/metrics.jsonl"));
  const Outcome run = tessera(arguments("uninterrupted"));
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("finished at step 24 of 24"), std::string::npos) << run.out;
  EXPECT_EQ(read_file(dir_->path("uninterrupted/metrics.jsonl")), before);
}

}  // namespace
}  // namespace tessera::test
