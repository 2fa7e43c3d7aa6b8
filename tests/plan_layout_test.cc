// Plans of runs that several processes share: memory of each process, and which layout to take.
#include "train/plan_layout.h"

#include <gtest/gtest.h>

#include <mutex>
#include <nlohmann/json.hpp>

#include "config/options.h"
#include "dist/in_process.h"
#include "support.h"
#include "train/trainer.h"

namespace tessera::test {
namespace {

using nlohmann::json;

class PlanOfSeveral : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_small_run(*dir_, 6);
  }
  static void TearDownTestSuite() { delete dir_; }

  static train::RunConfig config(const dist::Layout& layout) {
    train::RunConfig config = train::load_run_config(dir_->path("run.toml"), {});
    config.parallel = layout;
    config.threads = 1;
    config.train.micro_tokens = 256;
    return config;
  }
  static Outcome plan(const std::string& what, std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", what, dir_->path("run.toml")});
    return tessera(more);
  }
  static json plan_json(const std::string& what, std::vector<std::string> more) {
    more.push_back("--json");
    const Outcome o = plan(what, more);
    EXPECT_EQ(o.exit_code, 0) << o.err;
    return json::parse(o.out, nullptr, false);
  }
  static TemporaryDirectory* dir_;
};

TemporaryDirectory* PlanOfSeveral::dir_ = nullptr;

struct Peaks {
  int64_t planned = 0, measured = 0;  // the largest of all processes
};

TEST_F(PlanOfSeveral, MemoryIsThatOfTheProcessThatNeedsMost) {
  for (const dist::Layout& layout :
       {dist::Layout{.data = 4}, {.context = 4}, {.data = 4, .expert = 4}, {.data = 2, .expert = 2, .context = 2}}) {
    SCOPED_TRACE(layout.to_string());
    train::RunConfig run = config(layout);
    run.dir = dir_->path(layout.to_string());
    const train::RunPlan plan = train::plan_run(run);
    Peaks peaks;
    std::mutex mutex;
    dist::run_in_process(static_cast<int>(layout.processes()), {}, [&](dist::Transport& transport) {
      dist::Mesh mesh(layout, transport);
      const train::RunResult result = train::Trainer(run, &mesh).run([](const train::Progress&) {});
      const std::lock_guard lock(mutex);
      peaks.planned = std::max(peaks.planned, result.plan.planned_peak);
      peaks.measured = std::max(peaks.measured, result.peak_bytes);
    });
    EXPECT_FALSE(plan.assumed);
    EXPECT_EQ(plan.memory.planned_peak, peaks.planned);
    if (layout.expert == 1) {
      EXPECT_EQ(peaks.planned, peaks.measured);
    } else {  // rows that other processes send are planned at mem.imbalance
      EXPECT_GE(peaks.planned, peaks.measured);
    }
  }
}

TEST_F(PlanOfSeveral, CommandPlansWhatTheRunFileSays) {
  const json one = plan_json("memory", {}), four = plan_json("memory", {"--parallel.context", "4"});
  EXPECT_EQ(one.at("processes"), 1);
  EXPECT_EQ(four.at("processes"), 4);
  EXPECT_EQ(four.at("rank"), 3);  // it has the keys of all
  EXPECT_LT(four.at("peak_bytes").get<int64_t>(), one.at("peak_bytes").get<int64_t>());
  EXPECT_LE(four.at("usable_bytes").get<double>(), 0.3 * one.at("usable_bytes").get<double>());
}

TEST_F(PlanOfSeveral, ProcessesOfOneMachineShareItsMemory) {
  const train::MemoryPlan half{.planned_peak = train::usable_bytes(Device::cpu) / 2};
  EXPECT_NO_THROW(require_memory(half, config({}), 1));
  try {
    require_memory(half, config({.data = 4}), 4);
    ADD_FAILURE() << "four times a half is too much";
  } catch (const UserError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("a process of the run needs")) << error.what();
  }
}

TEST_F(PlanOfSeveral, OffersOnlyWhatTheRunFileMayHave) {
  for (const int64_t expert : {1, 2}) {
    train::RunConfig run = config({.data = 2, .expert = expert});
    run.train.tokens_per_step = 1 << 16;
    run.train.micro_tokens = 1 << 15;
    const train::RunPlan plan = train::plan_run(run);
    const std::vector<train::Change> changes = train::cheapest_changes(run, plan.memory.planned_peak);  // 5 % too much
    ASSERT_FALSE(changes.empty());
    bool blocks = false;
    for (const train::Change& change : changes) {
      blocks = blocks || change.settings.find("ffn_block_tokens") != std::string::npos ||
               change.settings.find("recompute_selective") != std::string::npos;
    }
    EXPECT_EQ(blocks, expert == 1);
  }
}

// ---- layouts ----

TEST_F(PlanOfSeveral, LayoutsAreRankedAndLegal) {
  const json plan = plan_json("layout", {"--processes", "4", "--memory", "8"});
  const json& layouts = plan.at("layouts");
  ASSERT_GT(layouts.size(), 4u);
  double seconds = 0;
  for (const json& l : layouts) {
    int processes = 1;
    for (const char* axis : {"data", "context", "pipeline", "tensor"}) processes *= l.at(axis).get<int>();
    EXPECT_EQ(processes, 4);
    EXPECT_EQ(l.at("idle_s") > 0, l.at("pipeline") > 1);
    EXPECT_TRUE(l.at("fits").get<bool>());
    EXPECT_GE(l.at("step_s").get<double>(), seconds);
    EXPECT_FALSE(l.at("why").get<std::string>().empty());
    seconds = l.at("step_s");
  }
  const std::string wins = "the fastest of " + std::to_string(layouts.size()) + " that fit";
  EXPECT_TRUE(layouts.at(0).at("why").get<std::string>().starts_with(wins)) << layouts.at(0);
  // Two micro-batches of 512 do not go round four processes; four of 256 do.
  for (const json& l : layouts) EXPECT_EQ(l.at("micro_tokens"), l.at("data") == 4 ? 256 : 512) << l;
  for (const char* axis : {"expert", "context", "pipeline", "tensor"}) {
    EXPECT_TRUE(std::ranges::any_of(layouts, [&](const json& l) { return l.at(axis) > 1; })) << axis;
  }
}

TEST_F(PlanOfSeveral, HeadsStayInsideANode) {
  const json plan = plan_json("layout", {"--processes", "4", "--memory", "8", "--parallel.ranks_per_node", "1"});
  for (const json& l : plan.at("layouts")) EXPECT_EQ(l.at("tensor"), 1) << l;
}

TEST_F(PlanOfSeveral, LinesGoIntoTheRunFile) {
  const Outcome o = plan("layout", {"--processes", "4", "--memory", "8"});
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const size_t lines = o.out.find("[parallel]");
  ASSERT_NE(lines, std::string::npos) << o.out;
  write_file(dir_->path("pasted.toml"), read_file(dir_->path("run.toml")) + o.out.substr(lines));
  const train::RunConfig pasted = train::load_run_config(
      dir_->path("pasted.toml"), [](config::Options& options) { options.set("train.micro_tokens", "256"); });
  EXPECT_EQ(pasted.parallel.processes(), 4);
}

TEST_F(PlanOfSeveral, SlowLinksBetweenNodesDecide) {
  const auto exchanged = [](const json& plan, size_t i) {
    return plan.at("layouts").at(i).at("across_bytes_per_step");
  };
  const json plan = plan_json("layout", {"--processes", "4", "--memory", "8", "--parallel.ranks_per_node", "2",
                                         "--tflops", "1000", "--inside", "1000", "--across", "0.0001"});
  EXPECT_EQ(plan.at("processes_per_node"), 2);
  for (size_t i = 1; i < plan.at("layouts").size(); ++i) {
    EXPECT_LE(exchanged(plan, 0).get<double>(), 1.05 * exchanged(plan, i).get<double>());
  }
}

TEST_F(PlanOfSeveral, WhatOneProcessCannotHoldIsSharedOut) {
  const Outcome o = tessera({"plan", "layout", source_path("configs/runs/h200-3b-a0.5b.toml"), "--model.file",
                             source_path("configs/models/h200-3b-a0.5b.toml"), "--processes", "8", "--memory", "30",
                             "--train.recompute_selective", "false", "--train.recompute_all", "true",
                             "--train.micro_tokens", "8192", "--json"});
  ASSERT_EQ(o.exit_code, 0) << o.err;
  const json plan = json::parse(o.out);
  EXPECT_EQ(plan.at("target"), "H200");
  int fitting = 0, too_large = 0;
  for (const json& l : plan.at("layouts")) {
    const bool fits = l.at("fits");
    (fits ? fitting : too_large) += 1;
    EXPECT_TRUE(!fits || l.at("expert") > 1 || l.at("pipeline") > 1) << l;
    EXPECT_EQ(fits, !l.at("why").get<std::string>().starts_with("does not fit")) << l;
  }
  EXPECT_GT(fitting, 0);
  EXPECT_GT(too_large, 0);
}

TEST_F(PlanOfSeveral, NoLegalLayoutNamesTheNearest) {
  const Outcome o = plan("layout", {"--processes", "17"});  // of 1024 tokens, in sequences of 128
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_NE(o.err.find("no layout of 17 processes is legal"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("the nearest that works: --processes 16"), std::string::npos) << o.err;
  EXPECT_EQ(plan("layout", {"--processes", "16"}).exit_code, 0);
}

TEST_F(PlanOfSeveral, NoLayoutThatFitsSaysWhatDoes) {
  const Outcome o = plan("layout", {"--processes", "2", "--memory", "0.001"});
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_NE(o.err.find("no layout of 2 processes fits"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("take more processes"), std::string::npos) << o.err;
}

// ---- time ----

TEST(Network, LatencyAndBandwidth) {
  const train::Target h200 = *train::gpu_target("h200");
  const double half = double(1 << 20);
  train::Flow flow{.axis = "replica", .what = "gradients", .inside = 8 * half, .messages_inside = 8};
  // Messages of V_half reach half the rate.
  EXPECT_NEAR(seconds_of(flow, h200), 8 * 2e-6 + 2 * 8 * half / (0.8 * 450e9), 1e-12);
  flow.across = flow.inside, flow.messages_across = 8;
  EXPECT_NEAR(seconds_of(flow, h200), 8 * 5e-6 + 2 * 8 * half / (0.8 * 50e9), 1e-12);  // the slower of the two
  flow.rows = 1;
  EXPECT_NEAR(seconds_of(flow, h200), 8 * 5e-6 + 2 * 8 * half / (0.65 * 50e9), 1e-12);
  EXPECT_FALSE(train::gpu_target("abacus"));
}

}  // namespace
}  // namespace tessera::test
