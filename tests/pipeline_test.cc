// The layers of a model on several processes: a pipeline takes the very step of one process.
#include "layouts.h"

namespace tessera::test {
namespace {

// Of every layer and expert, in the state of the guard.
Values watched_loads(const std::string& guard) {
  Values loads;
  const auto state = nlohmann::json::parse(guard);
  for (const auto& layer : state.at("layers")) {
    for (const auto& expert : layer.at("window")) loads.push_back(expert.at(0));
  }
  return loads;
}

// A process of a pipeline takes sums in the order in which one process takes them: everything is the same bits but the
// norm, a sum over processes.
void expect_pipeline_as_alone(const dist::Layout& layout, const Problem& problem) {
  SCOPED_TRACE(layout.to_string());
  const Result result = together(layout, problem), &wanted = alone(problem);
  expect_same(result, wanted, Forward::same_bits);
  EXPECT_EQ(watched_loads(result.guard), watched_loads(wanted.guard));
  if (layout.pipeline_chunks > 1) return;  // gradients of blocks meet in another order
  EXPECT_EQ(result.guard, wanted.guard);
  EXPECT_EQ(result.losses.front(), wanted.losses.front());
  EXPECT_EQ(result.gradients, wanted.gradients);
}

TEST(Pipeline, OfEveryLength) {
  for (const double min_tokens : {kMovesAtOnce, kWaits}) {
    for (const int64_t processes : {2, 3, 4}) {  // 4: a process without experts
      expect_pipeline_as_alone({.pipeline = processes}, {.min_tokens = min_tokens});
    }
  }
}

// Gradients differ by roundings, so that after a step a choice of the routers on a near tie may, too: heads are clipped
// to where these steps have none.
TEST(Pipeline, OfSeveralChunks) {
  expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 2}, {.qk_clip = 3});
  expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 4}, {.layers = 8, .qk_clip = 3});
  expect_pipeline_as_alone({.pipeline = 3, .pipeline_chunks = 2}, {.layers = 8, .micro_batches = 6, .qk_clip = 3});
  expect_pipeline_as_alone({.pipeline = 4, .pipeline_chunks = 2}, {.layers = 8, .qk_clip = 3});
}

// Cuts on and beside the edges of blocks, and no blocks at all.
TEST(Pipeline, OfEveryResidual) {
  for (const int64_t block : {1, 2, 3, 7}) {
    const Problem problem{.layers = 7, .attn_res_block = block};
    expect_pipeline_as_alone({.pipeline = 2}, problem);
    expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 3}, problem);
  }
  for (const Residual residual : {Residual::every_sublayer, Residual::plain}) {
    const Problem problem{.layers = 7, .residual = residual};
    expect_pipeline_as_alone({.pipeline = 3}, problem);
    expect_pipeline_as_alone({.pipeline = 2, .pipeline_chunks = 2}, problem);
  }
}

// Fewer micro-batches than processes.
TEST(Pipeline, ThatIsNeverFull) {
  expect_pipeline_as_alone({.pipeline = 4}, {.micro_batches = 2});
  expect_pipeline_as_alone({.pipeline = 4}, {.micro_batches = 1});
}

// The other processes do not see its counts.
TEST(Pipeline, ABlindRouterOfOneStageRefusesTheStepEverywhere) {
  const dist::Layout layout{.pipeline = 2, .pipeline_chunks = 2};
  dist::run_in_process(2, {.deadline_seconds = 10}, [&](dist::Transport& transport) {
    dist::Mesh mesh(layout, transport);
    const train::RunConfig run = run_of(layout, {});
    const model::Model model(config_of({}), {.mesh = &mesh});
    Arena arena(int64_t{1} << 30);
    Context ctx{Device::cpu, arena};
    train::Stepper stepper(ctx, model, run);
    stepper.initialise(1);
    if (model.has_moe(2)) *stepper.weights()[model.table().layer(2).moe.router].as<float>() = 3e38f;
    stepper.accumulate(ctx, Batches(0, 0, 8).all, 8 * kMicroTokens);
    const train::StepReport report = stepper.finish(ctx, 0.01, 0);
    EXPECT_FALSE(report.finite);
    EXPECT_EQ(report.blind_routers, std::vector<int64_t>{3});
  });
}

}  // namespace
}  // namespace tessera::test
