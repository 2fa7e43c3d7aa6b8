// One optimisation step on a small model: what refuses it, and what its options change.
#include "train/step.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/philox.h"

namespace tessera::test {
namespace {

using Values = std::vector<float>;

constexpr int64_t kTokens = 64;

model::ModelConfig small_config() {
  model::ModelConfig c;
  c.layers = 3;
  c.width = 16;
  c.vocabulary = 50;
  c.init_std = 0.1;
  c.mla_layers = {3};
  c.kda = {.heads = 1, .head_dim = 16, .gate_rank = 8, .chunk = 16};
  c.mla = {.heads = 1, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 4, .value_dim = 8};
  c.ffn.dense_layers = 1;
  c.ffn.dense_hidden = 32;
  c.moe.experts = 8;
  c.moe.top_k = 2;
  c.moe.hidden = 16;
  c.moe.latent = 0;
  c.moe.latent_norm = false;
  c.moe.shared = 1;
  return c;
}

// A model in training on two micro-batches of random tokens a step.
struct Training {
  train::RunConfig run;
  model::ModelConfig config = small_config();
  model::Model model{config, {}};
  Arena arena{int64_t{1} << 28};
  Context ctx{Device::cpu, arena};
  train::Stepper stepper;

  static train::RunConfig run_of(bool decay_idle_experts) {
    train::RunConfig r;
    r.train.micro_tokens = kTokens;
    r.optim.decay_idle_experts = decay_idle_experts;
    return r;
  }
  explicit Training(bool decay_idle_experts = true) : run(run_of(decay_idle_experts)), stepper(ctx, model, run) {
    stepper.initialise(1);
  }

  const model::MoeParams& moe(int64_t layer) const { return model.table().layer(layer).moe; }
  const View& weight(model::ParamId id) const { return stepper.weights()[id]; }
  train::StepReport take() {
    const std::vector<int64_t> offsets{0, 20, 21, kTokens};
    const Philox random(3, Purpose::test);
    for (uint64_t batch = 0; batch < 2; ++batch) {
      std::vector<int32_t> ids, targets;
      for (uint64_t t = 0; t < kTokens; ++t) {
        ids.push_back(static_cast<int32_t>(random.bits(1000 * batch + t) % 50));
        targets.push_back(static_cast<int32_t>(random.bits(1000 * batch + 500 + t) % 50));
      }
      stepper.accumulate(ctx, stepper.place(ctx, ids.data(), targets.data(), offsets), 2 * kTokens);
    }
    return stepper.finish(ctx, 0.01, 0);
  }
  std::vector<Values> everything() const {  // weights, biases and optimizer state
    std::vector<Values> all;
    for (const train::Piece& piece : stepper.state()) {
      const View& view = piece.view;
      if (view.dtype() == DType::f32) all.emplace_back(view.as<float>(), view.as<float>() + view.elements());
    }
    return all;
  }
};

TEST(Step, BlindRouterRefusesTheStepAndIsNamed) {
  Training training;
  EXPECT_EQ(training.take().refusal(), "");
  // Logits that overflow from finite operands leave a finite loss and a finite gradient: the tokens only go nowhere.
  for (const float bad : {3e38f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    float& weight = *training.weight(training.moe(2).router).as<float>();
    const float good = std::exchange(weight, bad);
    const std::vector<Values> before = training.everything();
    const train::StepReport report = training.take();
    EXPECT_FALSE(report.finite);
    EXPECT_EQ(report.blind_routers, std::vector<int64_t>{3});
    EXPECT_NE(report.refusal().find("router of layer 3 met NaN or infinity"), std::string::npos) << report.refusal();
    weight = good;
    std::vector<Values> after = training.everything();
    ASSERT_EQ(after.size(), before.size());
    int64_t changed = 0;
    for (size_t i = 0; i < after.size(); ++i) {
      for (size_t j = 0; j < after[i].size(); ++j) changed += !(after[i][j] == before[i][j]);
    }
    EXPECT_EQ(changed, 1) << "the weight that was put right";
    const train::StepReport next = training.take();  // nothing of the refused step is left
    EXPECT_TRUE(next.finite);
    EXPECT_TRUE(next.blind_routers.empty());
  }
}

TEST(Step, GradientThatIsNotFiniteIsToldApart) {
  Training training;
  *training.weight(training.model.table().head).as<float>() = std::numeric_limits<float>::infinity();
  const train::StepReport report = training.take();
  EXPECT_FALSE(report.finite);
  EXPECT_TRUE(report.blind_routers.empty());
  EXPECT_NE(report.refusal().find("gradient is not finite"), std::string::npos) << report.refusal();
}

TEST(Step, ExpertsWithoutATokenDecayUnlessToldOtherwise) {
  constexpr int64_t kIdle = 3;
  for (const bool decay : {true, false}) {
    Training training(decay);
    for (int64_t layer : {1, 2}) training.weight(training.moe(layer).bias).as<float>()[kIdle] = -10;
    const auto experts = [&](int64_t layer) {
      std::vector<Values> weights;
      for (const model::ParamId id : {training.moe(layer).w1, training.moe(layer).w2, training.moe(layer).w3}) {
        const View idle = training.weight(id).at(kIdle);
        weights.emplace_back(idle.as<float>(), idle.as<float>() + idle.elements());
      }
      return weights;
    };
    const std::vector<Values> before[2] = {experts(1), experts(2)};
    const Values busy(training.weight(training.moe(1).w1).as<float>(),
                      training.weight(training.moe(1).w1).as<float>() + 9);
    ASSERT_TRUE(training.take().finite);
    for (int64_t layer : {1, 2}) {
      const std::vector<Values> after = experts(layer);
      for (size_t i = 0; i < after.size(); ++i) {
        for (size_t j = 0; j < after[i].size(); ++j) {
          const float start = before[layer - 1][i][j];
          if (decay) {
            EXPECT_NEAR(after[i][j], 0.999f * start, 1e-6f);
          } else {
            EXPECT_EQ(after[i][j], start);
          }
        }
      }
    }
    for (size_t j = 0; j < busy.size(); ++j) {
      EXPECT_NE(training.weight(training.moe(1).w1).as<float>()[j], busy[j]);
    }
  }
}

}  // namespace
}  // namespace tessera::test
