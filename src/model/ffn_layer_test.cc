// What the whole-model check of selfcheck cannot see: the router z-loss, which is in the gradient and not in the loss.
#include "model/ffn_layer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "core/philox.h"
#include "model/model.h"
#include "ops/router/reference.h"

namespace tessera::model {
namespace {

constexpr int64_t kTokens = 21;

ModelConfig tiny(int64_t latent) {
  ModelConfig c;
  c.layers = 2;
  c.width = 12;
  c.mla_layers = {2};
  c.kda = {.heads = 2, .head_dim = 8, .gate_rank = 8, .chunk = 16};
  c.mla = {.heads = 2, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 4, .value_dim = 8};
  c.ffn.dense_hidden = 16;
  c.init_std = 0.3;
  c.moe = {.experts = 6, .top_k = 2, .hidden = 8, .latent = latent, .router_init_std = 0.7};
  return c;
}

// The MoE layer of a tiny model in float64, on random rows.
struct Layer {
  Model model;
  Arena arena{int64_t{1} << 26};
  Context ctx{Device::cpu, arena};
  Weights weights;
  View x, dy, dx, y;
  const std::vector<int64_t> offsets{0, kTokens};

  explicit Layer(int64_t latent) : model(tiny(latent), {}) {
    weights = allocate_weights(arena, model.table(), DType::f64, true);
    initialise(model.config(), model.table(), weights, 3);
    const Shape rows{kTokens, model.config().width};
    for (View* view : {&x, &dy, &dx, &y}) *view = arena.allocate_zeroed(DType::f64, rows);
    const Philox random(17, Purpose::test);
    for (int64_t i = 0; i < rows.elements(); ++i) {
      x.as<double>()[i] = random.normal(uint64_t(i));
      dy.as<double>()[i] = random.normal(uint64_t(i) + 10000);
    }
  }
  const MoeParams& params() const { return model.table().layer(1).moe; }
  LayerContext context() { return {ctx, model.config(), weights, {offsets}, kTokens, DType::f64}; }

  // <dy, y> + z_loss * (sum of lse^2), by the definition.
  double loss(double z_loss) {
    Arena::Scope scope(arena);
    const LayerContext lc = context();
    auto saved = latent_moe::allocate_dear(lc, params());
    latent_moe::allocate_cheap(lc, params(), saved);
    latent_moe::forward(lc, params(), x, y, saved, nullptr);
    const View logits = lc.allocate({kTokens, model.config().moe.experts});
    project(lc, x, params().router, logits);
    const std::vector<double> z(logits.as<double>(), logits.as<double>() + logits.elements());
    const auto squares = ops::router::reference::z_loss(kTokens, model.config().moe.experts, z);
    return std::inner_product(dy.as<double>(), dy.as<double>() + dy.elements(), y.as<double>(), 0.0) +
           z_loss * std::accumulate(squares.begin(), squares.end(), 0.0);
  }
  void backward(double z_loss) {
    Arena::Scope scope(arena);
    zero_gradients(weights);
    const LayerContext lc = context();
    auto saved = latent_moe::allocate_dear(lc, params());
    latent_moe::allocate_cheap(lc, params(), saved);
    latent_moe::forward(lc, params(), x, y, saved, nullptr);
    latent_moe::backward(lc, params(), x, saved, dy, dx, z_loss);
  }
  void expect_gradient(const View& value, const View& gradient, double z_loss, const char* what) {
    for (int64_t i = 0; i < value.elements(); i += 7) {
      double& v = value.as<double>()[i];
      const double before = v, h = 1e-6;
      v = before + h;
      const double up = loss(z_loss);
      v = before - h;
      const double down = loss(z_loss);
      v = before;
      EXPECT_NEAR(gradient.as<double>()[i], (up - down) / (2 * h), 1e-6) << what << " " << i;
    }
  }
};

TEST(LatentMoe, RouterZLossByCentralDifferences) {
  for (int64_t latent : {0, 10}) {
    for (double z_loss : {0.0, 0.3}) {
      Layer layer(latent);
      layer.backward(z_loss);
      layer.expect_gradient(layer.weights[layer.params().router], layer.weights.d(layer.params().router), z_loss,
                            "router");
      layer.expect_gradient(layer.x, layer.dx, z_loss, "x");
    }
  }
}

// The coefficient is of a mean over the step: with half the rows at a time and the same scale, gradients add up.
TEST(RouterZLoss, AddsUpOverMicroBatchesAndIsTheSameRecomputed) {
  const std::vector<int64_t> all{0, kTokens, 2 * kTokens}, one{0, kTokens};
  std::vector<std::vector<float>> gradients;
  for (int mode = 0; mode < 3; ++mode) {  // whole, in two parts, whole and recomputed
    ModelOptions options;
    if (mode == 2) options.recompute = {Recompute::full, Recompute::full};
    const Model model(tiny(10), options);
    Arena arena(int64_t{1} << 28);
    Context ctx{Device::cpu, arena};
    const Weights weights = allocate_weights(arena, model.table(), DType::f32, true);
    initialise(model.config(), model.table(), weights, 3);
    StepRecord record = model.allocate_record(arena, DType::f32, {});
    record.routers[0].z_loss = 0.5;
    const View ids = arena.allocate(DType::i32, {2 * kTokens}), targets = arena.allocate(DType::i32, {2 * kTokens}),
               loss = arena.allocate(DType::f32, {2 * kTokens});
    for (int64_t t = 0; t < 2 * kTokens; ++t) {
      ids.as<int32_t>()[t] = int32_t(t * 5 % 200);
      targets.as<int32_t>()[t] = -1;  // no other gradient reaches the router
    }
    if (mode == 1) {
      for (int64_t begin : {int64_t{0}, kTokens}) {
        model.forward_backward(ctx, weights, {ids.row_range(begin, kTokens), targets.row_range(begin, kTokens), {one}},
                               0.1, loss.row_range(0, kTokens), &record);
      }
    } else {
      model.forward_backward(ctx, weights, {ids, targets, {all}}, 0.1, loss, &record);
    }
    const View& d = weights.d(model.table().layer(1).moe.router);
    gradients.emplace_back(d.as<float>(), d.as<float>() + d.elements());
  }
  double square = 0, error = 0;
  for (size_t i = 0; i < gradients[0].size(); ++i) {
    square += double(gradients[0][i]) * double(gradients[0][i]);
    error += std::pow(double(gradients[0][i]) - double(gradients[1][i]), 2);
  }
  EXPECT_GT(square, 0);
  EXPECT_LT(std::sqrt(error / square), 1e-5);
  EXPECT_EQ(gradients[0], gradients[2]);
}

// Blocks of 16 and of 10 tokens. Products of other shapes round in other places, so logits agree to a few roundings;
// what the routers count is the same.
TEST(FfnBlocks, RoutersCountTheSame) {
  constexpr int64_t kAll = 2 * kTokens;
  const std::vector<int64_t> offsets{0, kTokens, kAll};
  std::vector<std::vector<ops::router::Counters>> counters;
  std::vector<std::vector<float>> losses;
  Arena arena(int64_t{1} << 28);
  Context ctx{Device::cpu, arena};
  for (int64_t block : {int64_t{0}, int64_t{16}}) {
    const Model model(tiny(10), {.ffn_block_tokens = block});
    const Weights weights = allocate_weights(arena, model.table(), DType::f32, true);
    initialise(model.config(), model.table(), weights, 3);
    StepRecord record = model.allocate_record(arena, DType::f32, {.counters = {.output_squares = true}});
    const View ids = arena.allocate(DType::i32, {kAll}), loss = arena.allocate(DType::f32, {kAll});
    for (int64_t t = 0; t < kAll; ++t) ids.as<int32_t>()[t] = int32_t(t * 5 % 200);
    model.forward_backward(ctx, weights, {ids, ids, {offsets}}, 0.1, loss, &record);
    counters.push_back(record.counters);
    losses.emplace_back(loss.as<float>(), loss.as<float>() + kAll);
  }
  ASSERT_EQ(counters[0].size(), 1u);
  const ops::router::Counters &whole = counters[0][0], &blocks = counters[1][0];
  const auto expect_same = [](const View& a, const View& b, const char* what) {
    EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.bytes())), 0) << what;
  };
  EXPECT_EQ(*whole.tokens.as<int64_t>(), kAll);
  expect_same(whole.tokens, blocks.tokens, "tokens");
  expect_same(whole.load, blocks.load, "load");
  expect_same(whole.by_bias, blocks.by_bias, "by_bias");
  expect_same(whole.histogram, blocks.histogram, "histogram");
  expect_same(whole.invalid, blocks.invalid, "invalid");
  for (int64_t e = 0; e < 6; ++e) {
    const double squares = whole.output_squares.as<double>()[e], weight = whole.weight.as<double>()[e];
    EXPECT_NEAR(blocks.output_squares.as<double>()[e], squares, 1e-5 * squares) << e;
    EXPECT_NEAR(blocks.weight.as<double>()[e], weight, 1e-6 * weight) << e;
  }
  for (size_t t = 0; t < losses[0].size(); ++t) EXPECT_NEAR(losses[0][t], losses[1][t], 1e-5f) << t;
}

}  // namespace
}  // namespace tessera::model
