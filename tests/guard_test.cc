// The collapse guard (moe.md 6): a router row of zeros is found within three windows and revived; off changes nothing.
#include "train/guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/philox.h"
#include "ops/router/balance.h"
#include "train/step.h"

namespace tessera::test {
namespace {

model::ModelConfig toy() {
  model::ModelConfig c;
  c.layers = 2;
  c.width = 32;
  c.mla_layers = {2};
  c.kda = {.heads = 2, .head_dim = 16, .gate_rank = 8, .chunk = 16};
  c.mla = {.heads = 2, .q_rank = 0, .kv_rank = 16, .nope_dim = 16, .rope_dim = 8, .value_dim = 16};
  c.ffn.dense_hidden = 64;
  c.moe = {.experts = 8, .top_k = 2, .hidden = 16, .latent = 16};
  return c;
}

// A training of the toy on random tokens in which expert 3 is kept from all tokens until `release`.
struct ToyRun {
  static constexpr int64_t kTokens = 512;
  model::Model model{toy(), {}};
  train::RunConfig config;
  Arena arena{int64_t{1} << 30};
  Context ctx{Device::cpu, arena};
  train::Stepper stepper;
  train::Guard guard;
  std::vector<train::GuardEvent> events;
  double load_of_3 = 0;  // in the last step, over the mean
  int64_t step = 0;

  static train::RunConfig options() {
    train::RunConfig c;
    c.train.tokens_per_step = c.train.micro_tokens = kTokens;
    c.balance.method = ops::router::Balance::none;  // nothing but the guard helps
    return c;
  }
  explicit ToyRun(bool on)
      : config(options()), stepper(ctx, model, config), guard(model, {.on = on, .window = 5, .grace = 0, .seed = 1}) {
    model::initialise(model.config(), model.table(), stepper.weights(), 1);
    bias()[3] = -10;  // never selected
  }
  float* bias() { return stepper.weights()[model.table().layer(1).moe.bias].as<float>(); }

  void take(int64_t steps) {
    const std::vector<int64_t> offsets{0, kTokens};
    for (int64_t end = step + steps; step < end; ++step) {
      const Philox random(5, Purpose::test, static_cast<uint64_t>(step));
      std::vector<int32_t> ids(kTokens), targets(kTokens);
      for (size_t t = 0; t < ids.size(); ++t) {
        ids[t] = static_cast<int32_t>(random.bits(t) % 250);
        targets[t] = static_cast<int32_t>(random.bits(t + 9999) % 250);
      }
      stepper.accumulate(ctx, stepper.place(ctx, ids.data(), targets.data(), offsets), kTokens);
      load_of_3 = double(stepper.counters()[0].load.as<int64_t>()[3]) * 8 / double(kTokens * 2);
      stepper.finish(ctx, 1e-4, step, &guard);
      for (auto& event : guard.act(step + 1, false, stepper.weights(), stepper.optimizer())) events.push_back(event);
    }
  }
  bool saw(const std::string& what) const {
    return std::ranges::any_of(
        events, [&](const auto& e) { return e.what == what && e.layer == 2 && e.experts == std::vector<int64_t>{3}; });
  }
};

TEST(Guard, DeadExpertIsFoundInThreeWindowsAndRevived) {
  ToyRun run(true);
  run.take(14);
  EXPECT_FALSE(run.saw("dead"));
  EXPECT_EQ(run.load_of_3, 0);
  run.take(1);  // the third window ends
  EXPECT_TRUE(run.saw("dead"));
  EXPECT_TRUE(run.saw("revived"));
  run.take(20);
  EXPECT_GT(run.load_of_3, 0.5);
}

TEST(Guard, ResumeBetweenDetectionAndActionActsTheSame) {
  ToyRun whole(true), resumed(true);
  whole.take(15);
  resumed.take(12);
  const std::string state = resumed.guard.state();
  resumed.guard = train::Guard(resumed.model, {.on = true, .window = 5, .grace = 0, .seed = 1});
  resumed.guard.restore(state);
  resumed.take(3);
  EXPECT_TRUE(resumed.saw("revived"));
  for (model::ParamId id = 0; id < whole.model.table().size(); ++id) {
    const View& a = whole.stepper.weights()[id];
    const View& b = resumed.stepper.weights()[id];
    EXPECT_TRUE(std::equal(a.as<float>(), a.as<float>() + a.elements(), b.as<float>())) << whole.model.table()[id].name;
  }
}

TEST(Guard, StepThatIsNotFiniteLeavesAStateThatCanBeRestored) {
  ToyRun run(true);
  run.take(2);
  float& weight = *run.stepper.weights()[run.model.table().final_norm].as<float>();
  const float before = weight;
  weight = std::numeric_limits<float>::quiet_NaN();
  run.take(1);
  weight = before;
  const std::string state = run.guard.state();
  EXPECT_EQ(state.find("null"), std::string::npos) << state;
  run.guard.restore(state);
  EXPECT_EQ(run.guard.state(), state);
}

TEST(Guard, OffIsBitIdenticalToOnWithoutFindings) {
  ToyRun on(true), off(false);
  on.bias()[3] = off.bias()[3] = 0;
  on.take(12);
  off.take(12);
  EXPECT_FALSE(on.saw("revived"));
  for (model::ParamId id = 0; id < on.model.table().size(); ++id) {
    const View& a = on.stepper.weights()[id];
    const View& b = off.stepper.weights()[id];
    EXPECT_TRUE(std::equal(a.as<float>(), a.as<float>() + a.elements(), b.as<float>())) << on.model.table()[id].name;
  }
}

}  // namespace
}  // namespace tessera::test
