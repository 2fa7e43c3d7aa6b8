#include "train/guard_signals.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/arena.h"

namespace tessera::train {
namespace {

TEST(GuardSignals, AreRelativeToTheLayer) {
  //                          load weight by_bias gradient output
  const std::vector<ExpertSums> window{
      {100, 50, 0, 4, 400}, {100, 50, 50, 4, 100}, {0, 0, 0, 0, 0}, {200, 100, 0, 16, 200}};
  const Signals s = signals_of(window);
  EXPECT_EQ(s.u, (std::vector<double>{1, 1, 0, 2}));
  EXPECT_EQ(s.omega, (std::vector<double>{1, 1, 0, 2}));
  EXPECT_EQ(s.rho, (std::vector<double>{0, 0.5, 0, 0}));
  EXPECT_EQ(s.gn, (std::vector<double>{1, 1, 0, 2}));
  EXPECT_EQ(s.on, (std::vector<double>{2, 1, 0, 1})) << "RMS 2, 1 and 1; an expert without tokens has no part in it";
  EXPECT_NEAR(s.entropy, 1.5 * std::log(2) / std::log(4), 1e-12);
}

TEST(GuardSignals, OfNothing) {
  const Signals s = signals_of(std::vector<ExpertSums>(3));
  for (const auto& values : {s.u, s.omega, s.rho, s.gn, s.on}) EXPECT_EQ(values, std::vector<double>(3, 0.0));
}

TEST(GuardSignals, CosineFindsTheNearestRow) {
  Arena arena(1 << 12);
  const View rows = arena.allocate_zeroed(DType::f32, {4, 3});
  const float values[]{1, 0, 0, 3, 0, 0, 1, 1, 0, 0, 0, 0};
  std::copy_n(values, 12, rows.as<float>());
  const std::vector<double> cosine = router_cosines(rows);
  EXPECT_DOUBLE_EQ(cosine[0], 1);
  EXPECT_DOUBLE_EQ(cosine[1], 1);
  EXPECT_NEAR(cosine[2], std::sqrt(0.5), 1e-12);
  EXPECT_EQ(cosine[3], 0) << "a row of zeros points nowhere";
}

}  // namespace
}  // namespace tessera::train
