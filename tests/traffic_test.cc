// What processes send in a step: as a run counts it, beside the formulas that plan it.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "dist/in_process.h"
#include "support.h"
#include "train/trainer.h"

namespace tessera::test {
namespace {

using train::AxisTraffic;
using train::Flow;

class TrafficOfRun : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_small_run(*dir_, 6);
  }
  static void TearDownTestSuite() { delete dir_; }

  // Six steps with four micro-batches each.
  static std::vector<AxisTraffic> run(const dist::Layout& layout, const std::string& name,
                                      const std::function<void(train::RunConfig&)>& change = {}) {
    train::RunConfig config = train::load_run_config(dir_->path("run.toml"), {});
    config.dir = dir_->path(name);
    config.parallel = layout;
    config.threads = 1;
    config.train.micro_tokens = 256;
    config.eval.every = 0;
    config.optim.qk_clip = 100;
    if (change) change(config);
    std::vector<AxisTraffic> traffic;
    dist::run_in_process(static_cast<int>(layout.processes()), {.ranks_per_node = 2}, [&](dist::Transport& transport) {
      dist::Mesh mesh(layout, transport);
      const train::RunResult result = train::Trainer(config, &mesh).run([](const train::Progress&) {});
      if (transport.rank() == 0) traffic = result.traffic;
    });
    return traffic;
  }
  static TemporaryDirectory* dir_;
};

TemporaryDirectory* TrafficOfRun::dir_ = nullptr;

void expect_within_1_percent(double counted, double formula, const std::string& what) {
  EXPECT_LE(std::fabs(counted - formula), 0.01 * formula) << what << ": " << counted << " counted, " << formula;
}

void expect_formulas(const std::vector<AxisTraffic>& traffic, const std::vector<std::string>& axes) {
  std::vector<std::string> found;
  for (const AxisTraffic& a : traffic) {
    found.push_back(a.axis);
    const bool routed = a.balanced_per_token > 0;
    expect_within_1_percent(a.bytes(), routed ? a.formula_at_rows : a.formula(), a.axis);
    if (routed) continue;  // which rows leave the node is the router's choice
    expect_within_1_percent(a.inside, a.formula_inside, a.axis + " inside a node");
    expect_within_1_percent(a.across, a.formula_across, a.axis + " across nodes");
  }
  EXPECT_EQ(found, axes);
}

TEST_F(TrafficOfRun, IsWhatTheFormulasGive) {
  expect_formulas(run({.data = 2}, "d2"), {"world", "replica", "expert replica"});
  expect_formulas(run({.data = 4}, "d4"), {"world", "replica", "expert replica"});
  expect_formulas(run({.context = 2}, "c2"), {"world", "replica", "expert replica", "context"});
  expect_formulas(run({.context = 4}, "c4"), {"world", "replica", "expert replica", "context"});
  expect_formulas(run({.data = 4, .expert = 4}, "e4"), {"world", "replica", "expert"});
  expect_formulas(run({.data = 2, .expert = 2, .context = 2}, "d2e2c2"),
                  {"world", "replica", "expert", "expert replica", "context"});
}

TEST_F(TrafficOfRun, IsWhatTheFormulasGiveWhereTheModelIsCut) {
  expect_formulas(run({.tensor = 2}, "t2"), {"world", "tensor"});
  expect_formulas(run({.data = 2, .tensor = 2}, "d2t2"), {"world", "replica", "expert replica", "tensor"});
  expect_formulas(run({.pipeline = 2}, "p2"), {"world", "pipeline"});
  expect_formulas(run({.data = 2, .pipeline = 2}, "d2p2"), {"world", "replica", "expert replica", "pipeline"});
  expect_formulas(run({.context = 2, .pipeline = 2}, "c2p2"),
                  {"world", "replica", "expert replica", "context", "pipeline"});
}

TEST_F(TrafficOfRun, LayersThatAreMadeAgainExchangeAgain) {
  const dist::Layout layout{.data = 2, .expert = 2, .context = 2};
  const auto kept = run(layout, "kept"), again = run(layout, "again", [](auto&c) { c.train.recompute_all = true; });
  expect_formulas(again, {"world", "replica", "expert", "expert replica", "context"});
  for (const size_t axis : {size_t{2}, size_t{4}}) EXPECT_GT(again[axis].bytes(), 1.2 * kept[axis].bytes());
}

TEST_F(TrafficOfRun, RowsOfTokensAreCountedAndBalancedOnesPredicted) {
  // Every token wants five experts of eight, so that two processes with four each always get it: balanced for certain.
  std::string model = read_file(dir_->path("model.toml"));
  model.replace(model.find("top_k = 2"), 9, "top_k = 5");
  write_file(dir_->path("five.toml"), model);
  const auto with_five = [](train::RunConfig& c) { c.model_file = dir_->path("five.toml"); };
  const std::vector<AxisTraffic> traffic = run({.data = 2, .expert = 2}, "five", with_five);
  const AxisTraffic& expert = traffic.at(2);
  ASSERT_EQ(expert.axis, "expert");
  EXPECT_EQ(expert.rows_per_token, 1);
  EXPECT_NEAR(expert.balanced_per_token, 1, 1e-12);
  EXPECT_NEAR(expert.bytes(), expert.formula(), 1e-6 * expert.formula());
}

// ---- the formulas alone ----

// Flows of the first of the processes of a layout, over one micro-batch of one document.
std::vector<Flow> planned(const dist::Layout& layout, int64_t tokens, int ranks_per_node = 2) {
  std::vector<int> nodes;
  for (int r = 0; r < static_cast<int>(layout.processes()); ++r) nodes.push_back(r / ranks_per_node);
  dist::DryTransport transport(0, nodes);
  dist::Mesh mesh(layout, transport);
  model::ModelConfig c;  // 4 layers of width 128, all KDA but the third; 16 experts, 2 a token
  c.mla_layers = {3};
  const model::Model model(c, {.mesh = &mesh});
  train::RunConfig run;
  const std::vector<model::RouterOptions> routers(size_t(model.moe_layers()), {.balance = run.balance});
  return step_flows(model, run, routers, std::vector<std::vector<int64_t>>{{0, tokens}});
}

const Flow& find(const std::vector<Flow>& flows, const std::string& axis, const std::string& what) {
  const auto same = [&](const Flow& f) { return f.axis == axis && f.what == what; };
  const auto found = std::ranges::find_if(flows, same);
  if (found == flows.end()) throw std::runtime_error("no flow of " + what + " along " + axis);
  return *found;
}

TEST(Formulas, ByHand) {
  const std::vector<Flow> flows = planned({.data = 2, .expert = 4, .context = 2}, 1024);
  const Flow& gradients = find(flows, "replica", "gradients");
  EXPECT_NEAR(gradients.inside, gradients.across / 2, 1);  // one neighbour here, two on the other node
  EXPECT_EQ(find(flows, "replica", "parameters").bytes(), gradients.bytes());
  EXPECT_EQ(find(flows, "context", "KDA states").inside,
            3 * 2 * 4 * 32 * 64 * 4);  // layers, both ways, H K (K + V) f32
  EXPECT_EQ(find(flows, "context", "convolution windows").inside, 3 * 2 * 3 * 3 * 128 * 4);
  EXPECT_EQ(find(flows, "context", "MLA latents").inside, 512 * (64 + 16) * 4);
  // Three others of four experts each, of 16 with two chosen: 512 tokens reach 1 - (12 * 11) / (16 * 15) of each.
  const double rows = 3 * 512 * (1 - 12.0 * 11 / (16 * 15)), layers = 3;
  EXPECT_NEAR(find(flows, "expert", "rows of tokens").rows, layers * rows, 1e-6);
  EXPECT_NEAR(find(flows, "expert", "rows of tokens").bytes(), layers * rows * (4 * 128 * 4 + 2 * 12), 1e-3);
}

TEST(Formulas, StatesDoNotGrowWithTheSequenceAndLatentsDo) {
  for (const int64_t processes : {2, 8}) {
    const std::vector<Flow> shorter = planned({.context = processes}, 1 << 12);
    const std::vector<Flow> longer = planned({.context = processes}, int64_t{1} << 20);
    for (const char* what : {"KDA states", "convolution windows"}) {
      EXPECT_EQ(find(shorter, "context", what).bytes(), find(longer, "context", what).bytes());
    }
    EXPECT_EQ(256 * find(shorter, "context", "MLA latents").bytes(), find(longer, "context", "MLA latents").bytes());
  }
}

TEST(Formulas, OneProcessSendsNothing) { EXPECT_TRUE(planned({}, 1024).empty()); }

// What a KDA layer really sends, by its own count, over one document of any length.
TEST(ContextTraffic, OfKdaDoesNotGrowWithTheSequence) {
  const auto sent = [](int64_t tokens) {
    int64_t bytes = 0;
    dist::run_in_process(4, {}, [&](dist::Transport& transport) {
      dist::Mesh mesh({.context = 4}, transport);
      model::ModelConfig c;
      c.layers = 2;
      c.width = 32;
      c.kda = {.heads = 2, .head_dim = 16, .gate_rank = 8, .chunk = 16};
      c.moe.experts = 0;
      const model::Model model(c, {.mesh = &mesh});
      train::RunConfig run;
      run.train.micro_tokens = tokens;
      Arena arena(int64_t{1} << 28);
      Context ctx{Device::cpu, arena};
      train::Stepper stepper(ctx, model, run);
      stepper.initialise(1);
      const std::vector<int32_t> ids(size_t(tokens), 7);
      const std::vector<int64_t> offsets{0, tokens};
      stepper.accumulate(ctx, stepper.place(ctx, ids.data(), ids.data(), offsets), tokens);
      if (transport.rank() == 1) bytes = mesh.context.traffic().bytes();
    });
    return bytes;
  };
  const int64_t shorter = sent(64);
  EXPECT_GT(shorter, 0);
  EXPECT_EQ(sent(1024), shorter);
}

}  // namespace
}  // namespace tessera::test
