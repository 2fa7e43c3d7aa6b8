#include "ops/glu/op.h"

#include <array>
#include <cmath>
#include <limits>

#include "ops/check/gtest_table.h"
#include "ops/glu/cases.h"
#include "ops/glu/math.h"

namespace tessera::ops::glu {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr Activation kSitu{.kind = Kind::situ};
constexpr Activation kSwiGlu{.kind = Kind::swiglu};

TESSERA_OP_TABLE_TESTS(Glu, table())

template <class Real>
Derivatives<Real> situ(Real g, Real v) {
  return Situ<Real, true>(kSitu).derivatives(g, v);
}

TEST(Glu, PublishedOracleTable) {
  // g, v, h, dh/dg, dh/dv, ten digits: moe.md 4.
  constexpr std::array<std::array<double, 5>, 7> kOracle{{{0, 0, 0, 0, 0},
                                                          {1, 1, 0.7158178281, 0.8793527080, 0.7150548588},
                                                          {-1, 2, -0.5258288955, 0.1201302369, -0.2617960208},
                                                          {2, -3, -4.861066551, -2.647638163, 1.604904005},
                                                          {4, 10, 28.41622952, 4.428569697, 2.559715178},
                                                          {-8, 5, -0.006380883069, -0.00626183407, -0.001242769945},
                                                          {20, 100, 99.92385628, 0.004536742025, 0.005363315711}}};
  for (const auto& [g, v, h, dg, dv] : kOracle) {
    const auto got = situ(g, v);
    EXPECT_NEAR(got.h, h, 1e-9 * std::fabs(h)) << g;
    EXPECT_NEAR(got.gate, dg, 1e-9 * std::fabs(dg)) << g;
    EXPECT_NEAR(got.up, dv, 1e-9 * std::fabs(dv)) << g;
    EXPECT_NEAR((Situ<double, true>(kSitu).value(g, v)), got.h, 1e-14 * std::fabs(h));
    const auto single = situ(float(g), float(v));
    EXPECT_NEAR(double(single.h), h, 1e-6 * std::fabs(h)) << g;
    EXPECT_NEAR(double(single.gate), dg, 1e-6 * std::fabs(dg)) << g;
    EXPECT_NEAR(double(single.up), dv, 1e-6 * std::fabs(dv)) << g;
  }
}

TEST(Glu, GateBranchMinimum) {
  // With a linear up branch and v = 1, h is the gate branch.
  const Situ<double, false> act({.kind = Kind::situ, .up_cap = 0});
  EXPECT_NEAR(act.value(-1.21876, 1.0), -0.26976900, 5e-9);
  EXPECT_NEAR(act.derivatives(-1.21876, 1.0).gate, 0, 2e-6);
  for (double g = -60; g < 60; g += 0.01) EXPECT_GE(act.value(g, 1.0), -0.26976901) << g;
  EXPECT_EQ(act.derivatives(2.0, 7.0).up, act.value(2.0, 1.0));
}

TEST(Glu, BoundedByTheProductOfTheCaps) {
  // Every bf16 gate, against ups over the whole range.
  const Situ<float, true> act(kSitu);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float g = std::bit_cast<float>(bits << 16);
    if (std::isnan(g)) continue;
    for (float v : {0.0f, -1e-30f, 0.5f, -3.0f, 24.0f, -400.0f, 3e38f}) {
      const float h = act.value(g, v);
      EXPECT_LE(std::fabs(h), 100.0f) << g << " " << v;
      const auto slope = act.derivatives(g, v);
      EXPECT_TRUE(std::isfinite(slope.gate) && std::isfinite(slope.up)) << g << " " << v;
    }
  }
}

template <class Real>
void expect_limits() {
  const Real inf = std::numeric_limits<Real>::infinity();
  for (Real v : {Real(3), Real(-3), inf, -inf}) {
    const Real low = situ(-inf, v).h, high = situ(inf, v).h;
    EXPECT_EQ(low, Real(0));
    EXPECT_NEAR(double(high), 100 * std::tanh(double(v) / 25), 1e-4);
    for (Real g : {inf, -inf}) EXPECT_EQ(situ(g, v).gate, Real(0));
    EXPECT_EQ(situ(-inf, v).up, Real(0));
  }
  for (Real g : {Real(2), Real(-2), inf, -inf}) EXPECT_EQ(situ(g, inf).up, Real(0));
  const SwiGlu<Real> swiglu;
  EXPECT_EQ(swiglu.value(-inf, Real(2)), Real(0));
  EXPECT_EQ(swiglu.derivatives(-inf, Real(2)).gate, Real(0));
  EXPECT_EQ(swiglu.derivatives(inf, Real(2)).gate, Real(2));
}

TEST(Glu, InfinitePreActivationsGiveTheLimits) {
  expect_limits<float>();
  expect_limits<double>();
}

TEST(Glu, NaNPropagates) {
  const auto all_nan = [](const auto& d) { return std::isnan(d.h) && std::isnan(d.gate) && std::isnan(d.up); };
  EXPECT_TRUE(all_nan(situ(kNaN, 1.0)));
  EXPECT_TRUE(all_nan(situ(float(kNaN), 1.0f)));
  EXPECT_TRUE(std::isnan(situ(1.0, kNaN).h) && std::isnan(situ(1.0f, float(kNaN)).gate));
  EXPECT_TRUE(all_nan(SwiGlu<float>{}.derivatives(float(kNaN), 1.0f)));
  EXPECT_TRUE(std::isnan(SwiGlu<double>{}.value(1.0, kNaN)));
}

TEST(Glu, LargeCapsApproachSwiGlu) {
  const Situ<double, true> act({.kind = Kind::situ, .gate_cap = 1e6, .up_cap = 1e6});
  for (double g : {-9.0, -0.3, 0.0, 2.0, 12.0}) {
    EXPECT_NEAR(act.value(g, 1.5), SwiGlu<double>{}.value(g, 1.5), 1e-9);
    EXPECT_NEAR(act.derivatives(g, 1.5).gate, SwiGlu<double>{}.derivatives(g, 1.5).gate, 1e-9);
  }
}

// Gate and up as halves of one matrix, gradients written over them: both must equal the separate result bit for bit.
TEST(Glu, FusedHalvesAndGradientInPlace) {
  for (const Activation& activation : {kSitu, kSwiGlu}) {
    const Dims d{7, 21, activation};
    Arena arena(1 << 20);
    Context ctx{Device::cpu, arena};
    const View fused = arena.allocate(DType::f32, {d.rows, 2 * d.width});
    const View gate = arena.allocate(DType::f32, {d.rows, d.width}), up = arena.allocate(DType::f32, {d.rows, d.width});
    const View h = arena.allocate(DType::f32, {d.rows, d.width}), h2 = arena.allocate(DType::f32, {d.rows, d.width});
    const View dg = arena.allocate(DType::f32, {d.rows, d.width}), dv = arena.allocate(DType::f32, {d.rows, d.width});
    for (int64_t i = 0; i < d.rows * d.width; ++i) {
      float* row = fused.as<float>() + i / d.width * 2 * d.width + i % d.width;
      gate.as<float>()[i] = row[0] = float(i * 37 % 19) - 9.5f;
      up.as<float>()[i] = row[d.width] = float(i * 53 % 23) - 11.0f;
    }
    const View gate2 = fused.column_range(0, d.width), up2 = fused.column_range(d.width, d.width);
    forward(ctx, d, {gate, up}, {h});
    forward(ctx, d, {gate2, up2}, {h2});
    backward(ctx, d, {gate, up}, {h}, {dg, dv});
    backward(ctx, d, {gate2, up2}, {h2}, {gate2, up2});
    for (int64_t i = 0; i < d.rows * d.width; ++i) {
      const float* row = fused.as<float>() + i / d.width * 2 * d.width + i % d.width;
      EXPECT_EQ(h.as<float>()[i], h2.as<float>()[i]);
      EXPECT_EQ(dg.as<float>()[i], row[0]);
      EXPECT_EQ(dv.as<float>()[i], row[d.width]);
    }
  }
}

TEST(Glu, RefusesCapsThatDivideByZero) {
  Arena arena(1 << 12);
  Context ctx{Device::cpu, arena};
  const View x = arena.allocate(DType::f32, {1, 1});
  EXPECT_THROW(forward(ctx, {1, 1, {.kind = Kind::situ, .gate_cap = 0}}, {x, x}, {x}), Error);
}

}  // namespace
}  // namespace tessera::ops::glu
