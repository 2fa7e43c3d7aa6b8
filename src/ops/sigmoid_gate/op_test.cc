#include "ops/sigmoid_gate/op.h"

#include <cmath>

#include "ops/check/gtest_table.h"
#include "ops/sigmoid_gate/cases.h"

namespace tessera::ops::sigmoid_gate {
namespace {

TESSERA_OP_TABLE_TESTS(SigmoidGate, table())

TEST(SigmoidGate, ExtremeGatesAndGradientInPlace) {
  // exp(-|w|) keeps the relative accuracy of both tails: s (1 - s) = exp(-|w|) far out, never 0 / 0 or negative.
  const std::vector<float> gates{-1e4f, -150.0f, -60.0f, -20.0f, 0.0f, 20.0f, 60.0f, 150.0f, 1e4f};
  const Dims d{1, static_cast<int64_t>(gates.size())};
  Arena arena(1 << 16);
  Context ctx{Device::cpu, arena};
  const View x = arena.allocate(DType::f32, {1, d.width}), w = arena.allocate(DType::f32, {1, d.width});
  const View y = arena.allocate(DType::f32, {1, d.width}), dy = arena.allocate(DType::f32, {1, d.width});
  const View dw = arena.allocate(DType::f32, {1, d.width});
  for (int64_t i = 0; i < d.width; ++i) {
    w.as<float>()[i] = gates[static_cast<size_t>(i)];
    x.as<float>()[i] = 2.0f;
    dy.as<float>()[i] = 3.0f;
  }
  forward(ctx, d, {x, w}, {y});
  backward(ctx, d, {x, w}, {dy}, {dy, dw});
  for (int64_t i = 0; i < d.width; ++i) {
    const double gate = gates[static_cast<size_t>(i)], s = 1 / (1 + std::exp(-gate)), other = 1 / (1 + std::exp(gate));
    EXPECT_NEAR(y.as<float>()[i], 2 * s, 1e-6 * 2 * s + 1e-38) << gate;
    EXPECT_NEAR(dy.as<float>()[i], 3 * s, 1e-6 * 3 * s + 1e-38) << gate;
    EXPECT_NEAR(dw.as<float>()[i], 6 * s * other, 1e-6 * 6 * s * other + 1e-38) << gate;
  }
}

}  // namespace
}  // namespace tessera::ops::sigmoid_gate
