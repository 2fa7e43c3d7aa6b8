// A run whose experts collapse, as its user sees it: every alarm is answered, at last the run stops and asks; wherever
// it is resumed it does the same again.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "ckpt/checkpoint.h"
#include "support.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::vector<json> rows_of(const std::string& run) {
  std::vector<json> rows;
  std::istringstream in(read_file(run + "/metrics.jsonl"));
  for (std::string line; std::getline(in, line);) {
    rows.push_back(json::parse(line));
    rows.back().erase("time");
  }
  return rows;
}

std::vector<std::string> tensors_of(const std::string& run) {
  std::vector<std::string> tensors;
  const auto newest = ckpt::newest_valid(run + "/checkpoints");
  if (!newest) return tensors;
  for (const auto& t : ckpt::inspect(newest->path).manifest.tensors) tensors.push_back(t.name + " " + t.hash);
  return tensors;
}

// Without balancing the loads of this model are uneven from the first steps on.
class Escalation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_small_run(*dir_, 40,
                    "[checkpoint]\nevery = 1\nkeep_last = 100\n[guard]\nwindow = 1\ngrace = 0\naudit = 5\n"
                    "[balance]\nmethod = \"none\"\n");
    stopped_ = new Outcome(tessera({"train", dir_->path("run.toml")}));
  }
  static void TearDownTestSuite() {
    delete stopped_;
    delete dir_;
  }
  static Outcome train(const std::string& run, std::vector<std::string> more = {}) {
    std::vector<std::string> all{"train", dir_->path("run.toml"), "--run.dir", dir_->path(run)};
    all.insert(all.end(), more.begin(), more.end());
    return tessera(all);
  }
  // A copy of the stopped run as it was after `step` steps.
  static void cut_back(const std::string& name, int64_t step) {
    fs::copy(dir_->path("run"), dir_->path(name), fs::copy_options::recursive);
    for (const auto& entry : ckpt::list(dir_->path(name + "/checkpoints"))) {
      if (entry.step > step) fs::remove_all(entry.path);
    }
  }

  static TemporaryDirectory* dir_;
  static Outcome* stopped_;
};

TemporaryDirectory* Escalation::dir_ = nullptr;
Outcome* Escalation::stopped_ = nullptr;

TEST_F(Escalation, StopsAndAsksWithACheckpoint) {
  EXPECT_EQ(stopped_->exit_code, 2);
  EXPECT_EQ(stopped_->out, "");
  for (const char* part : {"rung: 3 of 5, router z-loss 0.0001", "every remedy is used up",
                           "the run is stopped and saved as", "guard.escalate = false"}) {
    EXPECT_NE(stopped_->err.find(part), std::string::npos) << part << "\n" << stopped_->err;
  }
  const std::vector<json> rows = rows_of(dir_->path("run"));
  const int64_t stop = rows.back().at("step");
  EXPECT_EQ(rows.back().at("guard").at("what"), "stop");
  EXPECT_LT(stop, 40);
  const auto newest = ckpt::newest_valid(dir_->path("run/checkpoints"));
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->step, stop);
  const auto audit = std::ranges::find_if(
      rows, [](const json& row) { return row.contains("guard") && row["guard"]["what"] == "audit"; });
  ASSERT_NE(audit, rows.end());
  for (const char* name : {"load", "omega", "rho", "b", "on", "gn", "cosine"}) {
    EXPECT_EQ(audit->at("guard").at(name).size(), 8u) << name;
  }
}

TEST_F(Escalation, ResumedBetweenRungsDoesTheSame) {
  const std::vector<json> want = rows_of(dir_->path("run"));
  std::vector<int64_t> rungs;
  for (const json& row : want) {
    if (row.contains("guard") && row["guard"]["what"] == "rung") rungs.push_back(row["step"]);
  }
  ASSERT_GE(rungs.size(), 2u);
  for (const int64_t step : {rungs.front() - 1, rungs.front(), rungs.back()}) {
    const std::string name = "from" + std::to_string(step);
    cut_back(name, step);
    const Outcome again = train(name);
    EXPECT_EQ(again.exit_code, 2) << again.err;
    EXPECT_EQ(rows_of(dir_->path(name)), want) << "resumed from step " << step;
    EXPECT_EQ(tensors_of(dir_->path(name)), tensors_of(dir_->path("run"))) << "resumed from step " << step;
  }
}

TEST_F(Escalation, GoesOnWhenToldTo) {
  cut_back("on", 40);
  const Outcome end = train("on", {"--guard.escalate", "false"});
  EXPECT_EQ(end.exit_code, 0) << end.err;
  EXPECT_NE(end.out.find("finished at step 40 of 40"), std::string::npos) << end.out;
  EXPECT_NE(end.err.find("set guard.escalate = true to have it answered"), std::string::npos) << end.err;
}

}  // namespace
}  // namespace tessera::test
