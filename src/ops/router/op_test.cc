#include "ops/router/op.h"

#include <cmath>
#include <limits>

#include "core/philox.h"
#include "ops/check/gtest_table.h"
#include "ops/router/cases.h"
#include "ops/router/reference.h"
#include "ops/router/select.h"

namespace tessera::ops::router {
namespace {

TESSERA_OP_TABLE_TESTS(Router, table())

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One routed batch in float32.
struct Routed {
  Dims d;
  Arena arena{1 << 24};
  Context ctx{Device::cpu, arena};
  View logits, bias;
  Outputs out;

  Routed(const Dims& dims, const std::vector<double>& z, const std::vector<double>& b) : d(dims) {
    arena.set_poison(true);
    logits = arena.allocate(DType::f32, {d.tokens, d.experts});
    bias = arena.allocate(DType::f32, {d.experts});
    std::copy(z.begin(), z.end(), logits.as<float>());
    std::copy(b.begin(), b.end(), bias.as<float>());
    const Shape selected{d.tokens, d.top_k};
    out = {arena.allocate(DType::i32, selected), arena.allocate(DType::f32, selected),
           arena.allocate(DType::f32, selected), arena.allocate(DType::f32, {d.tokens}),
           arena.allocate_zeroed(DType::i64, {1})};
    forward(ctx, d, {logits, bias}, out);
  }
  int32_t expert(int64_t i, int64_t r) const { return out.experts.as<int32_t>()[i * d.top_k + r]; }
  float weight(int64_t i, int64_t r) const { return out.weights.as<float>()[i * d.top_k + r]; }
};

TEST(Router, EqualScoresSelectTheLowestIndices) {
  for (int64_t experts : {4, 40, 100}) {
    const Dims d{3, experts, 3};
    const Routed r(d, std::vector<double>(size_t(3 * experts), 0.7), std::vector<double>(size_t(experts), 0));
    for (int64_t i = 0; i < d.tokens; ++i) {
      for (int32_t s = 0; s < 3; ++s) EXPECT_EQ(r.expert(i, s), s);
      EXPECT_FLOAT_EQ(r.weight(i, 1), 1.0f / 3);
    }
  }
}

TEST(Router, TieAtTheBoundaryGoesToTheLowerIndex) {
  std::vector<double> z(64, -1);
  z[5] = 2;
  z[40] = z[60] = 1;  // second and third: the cutoff equals the last selected
  const Routed r({1, 64, 2}, z, std::vector<double>(64, 0));
  EXPECT_EQ(r.expert(0, 0), 5);
  EXPECT_EQ(r.expert(0, 1), 40);
  EXPECT_EQ(r.out.cutoff.as<float>()[0], r.out.scores.as<float>()[1]);
}

TEST(Router, RowsWithNonFiniteLogitsAreRoutedNowhere) {
  const Dims d{4, 8, 3};
  std::vector<double> z(32, 0.5);
  z[3] = double(kNaN);
  z[8 + 7] = double(kInfinity);
  z[24] = -double(kInfinity);
  Routed r(d, z, std::vector<double>(8, 0));
  EXPECT_EQ(r.out.invalid.as<int64_t>()[0], 3);
  for (int64_t i : {0, 1, 3}) {
    for (int64_t s = 0; s < 3; ++s) {
      EXPECT_EQ(r.expert(i, s), -1);
      EXPECT_EQ(r.weight(i, s), 0.0f);
    }
  }
  EXPECT_EQ(r.expert(2, 2), 2);
  const View g = r.arena.allocate(DType::f32, {4, 3}), dz = r.arena.allocate(DType::f32, {4, 8});
  std::fill_n(g.as<float>(), 12, kNaN);
  for (int64_t s = 6; s < 9; ++s) g.as<float>()[s] = float(s);
  backward(r.ctx, d, r.out, {g}, {dz});
  for (int64_t i : {0, 1, 3}) {
    for (int64_t j = 0; j < 8; ++j) EXPECT_EQ(dz.as<float>()[i * 8 + j], 0.0f);
  }
  EXPECT_NE(dz.as<float>()[2 * 8 + 1], dz.as<float>()[2 * 8 + 2]);
  forward(r.ctx, d, {r.logits, r.bias}, r.out);
  EXPECT_EQ(r.out.invalid.as<int64_t>()[0], 6) << "invalid rows are added, not overwritten";
}

TEST(Router, ConstantAddedToTheBiasChangesNothing) {
  const std::vector<double> b{0.01, -0.03, 0.05, 0, -0.02, 0.04, 0.02, -0.05};
  const auto z = separated_logits(50, b, 3);
  auto shifted = b;
  for (double& v : shifted) v += 0.5;
  const Routed r({50, 8, 3}, z, b), s({50, 8, 3}, z, shifted);
  for (int64_t i = 0; i < 150; ++i) {
    EXPECT_EQ(r.out.experts.as<int32_t>()[i], s.out.experts.as<int32_t>()[i]);
    EXPECT_EQ(r.out.weights.as<float>()[i], s.out.weights.as<float>()[i]);
  }
}

TEST(Router, LargeBiasKeepsTheWeightsFinite) {
  // s recovered as c - b would be 0 here, and the weights 0 / 0.
  const Routed r({1, 4, 2}, {-30, -31, -32, -33}, {1e9, 1e9, 0, 0});
  EXPECT_EQ(r.expert(0, 0), 0);
  EXPECT_NEAR(double(r.weight(0, 0)), 1 / (1 + std::exp(-1.0)), 1e-5);
}

TEST(Router, CutoffWhereNothingIsLeft) {
  const Routed all({1, 3, 3}, {0, 1, 2}, {0.1, -0.2, 0.3});
  EXPECT_EQ(all.out.cutoff.as<float>()[0], -0.2f);
  const Routed one_group({1, 4, 2, 1, true, Score::sigmoid, 2, 1}, {0, 1, 3, 2}, {0, 0, 0, 0});
  EXPECT_EQ(one_group.expert(0, 0), 2);
  EXPECT_EQ(one_group.expert(0, 1), 3);
  EXPECT_EQ(one_group.out.cutoff.as<float>()[0], 0.0f);
}

TEST(Router, GroupTiesGoToTheLowerGroup) {
  const Routed r({1, 6, 2, 1, true, Score::sigmoid, 3, 1}, {1, 2, 2, 1, 0, 0}, std::vector<double>(6, 0));
  EXPECT_EQ(r.expert(0, 0), 1);
  EXPECT_EQ(r.expert(0, 1), 0);
}

TEST(Router, TopListAgreesWithSorting) {
  const Philox philox(5, Purpose::test);
  for (int64_t count : {1, 31, 32, 33, 200, 896}) {
    for (int64_t n : {int64_t{1}, int64_t{17}, count}) {
      if (n > count) continue;
      std::vector<double> c;
      for (int64_t j = 0; j < count; ++j) c.push_back(std::floor(philox.uniform(uint64_t(j)) * 50));  // many ties
      std::vector<double> values(static_cast<size_t>(n));
      std::vector<int32_t> indices(static_cast<size_t>(n));
      TopList<double>(values.data(), indices.data(), n).select(c.data(), count);
      const auto order = reference::order_of(c);
      for (size_t r = 0; r < size_t(n); ++r) EXPECT_EQ(size_t(indices[r]), order[r]) << count << " " << n;
    }
  }
}

TEST(Router, RefusesImpossibleSelections) {
  Arena arena(1 << 16);
  Context ctx{Device::cpu, arena};
  const View z = arena.allocate(DType::f32, {1, 4});
  for (const Dims& d : {Dims{1, 4, 0}, Dims{1, 4, 5}, Dims{1, 4, 3, 1, true, Score::sigmoid, 2, 1},
                        Dims{1, 4, 1, 1, true, Score::sigmoid, 3, 1}}) {
    EXPECT_THROW(forward(ctx, d, {z, z}, {}), Error);
  }
}

}  // namespace
}  // namespace tessera::ops::router
