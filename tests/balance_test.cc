// Quantile balancing on a real model and real text: `nano` with a router skewed by 3 nats, no auxiliary loss.
#include <gtest/gtest.h>

#include <cmath>

#include "data/loader.h"
#include "support.h"
#include "train/step.h"

namespace tessera::test {
namespace {

TEST(Balance, SkewedRouterOfNanoReachesTheSamplingFloorInTwentySteps) {
  constexpr int64_t kContext = 64, kTokens = 8192, kSteps = 30, kJudged = 10;
  const TemporaryDirectory dir;
  const Outcome built = tessera({"data", "build", "source=" + source_path("src"), "--out", dir.path("store")});
  ASSERT_EQ(built.exit_code, 0) << built.err;
  const data::Store store(dir.path("store/train"));
  data::Plan plan({.sources = {{.store = &store, .name = "src"}}, .context = kContext, .seed = 1});
  data::Loader loader(plan);

  train::RunConfig run;
  run.data.context = kContext;
  run.train.tokens_per_step = run.train.micro_tokens = kTokens;
  run.optim.learning_rate = 0.003;
  run.optim.schedule = optim::Shape::constant;
  run.optim.warmup_steps = run.train.steps = 1000;  // the usual slow start: 3 % of the peak after thirty steps
  model::ModelConfig config = model::load_model_config(source_path("configs/models/nano.toml"));
  config.moe.router_init_skew = 3;
  const model::Model model(config, {});

  Arena arena(int64_t{8} << 30);  // address space only
  Context ctx{Device::cpu, arena};
  train::Stepper stepper(ctx, model, run);
  model::initialise(config, model.table(), stepper.weights(), 1);
  double first_max_vio = 0, max_vio = 0, floor = 0, least = 1e300;
  for (int64_t step = 0; step < kSteps; ++step) {
    const data::Batch batch = loader.batch(step * (kTokens / kContext), kTokens / kContext);
    stepper.accumulate(ctx, stepper.place(ctx, batch.ids.data(), batch.targets.data(), batch.offsets),
                       batch.loss_tokens);
    for (const auto& layer : stepper.finish(ctx, run.schedule().at(step), step).balance) {
      const double share = 1.0 / double(model.moe_layers());
      if (step == 0) first_max_vio += share * layer.max_vio;
      if (step < kSteps - kJudged) continue;  // judged: steps 21 to 30, mean over steps and layers
      max_vio += share * layer.max_vio / kJudged;
      floor += share * layer.floor / kJudged;
      least = std::min(least, layer.min_load);
      EXPECT_EQ(layer.dead, 0);
    }
  }
  std::printf("MaxVio %.2f in the first step, %.3f in steps 21 to 30; sampling floor %.3f; least load %.2f\n",
              first_max_vio, max_vio, floor, least);
  EXPECT_GT(first_max_vio, 2);  // it was a hard start
  EXPECT_LE(max_vio, 2 * floor);
  EXPECT_GT(least, 0.1);  // the utilisation floor of the collapse guard
}

}  // namespace
}  // namespace tessera::test
