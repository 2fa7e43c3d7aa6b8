#include "ops/router/z_loss.h"

#include <cmath>
#include <limits>

#include "ops/check/gtest_table.h"
#include "ops/router/cases.h"

namespace tessera::ops::router::z_loss {
namespace {

TESSERA_OP_TABLE_TESTS(RouterZLoss, table())

TEST(RouterZLoss, RowsWithNonFiniteLogitsAreLeftAlone) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Arena arena(1 << 16);
  Context ctx{Device::cpu, arena};
  const Dims d{3, 4};
  const View z = arena.allocate_zeroed(DType::f32, {3, 4}), dz = arena.allocate_zeroed(DType::f32, {3, 4}),
             loss = arena.allocate(DType::f32, {3});
  z.as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  z.as<float>()[8] = -kInfinity;
  forward(ctx, d, {z}, {loss});
  backward(ctx, d, {z}, 1, {dz});
  for (int64_t i : {0, 2}) {
    EXPECT_EQ(loss.as<float>()[i], 0.0f);
    for (int64_t j = 0; j < 4; ++j) EXPECT_EQ(dz.as<float>()[i * 4 + j], 0.0f);
  }
  EXPECT_NEAR(double(loss.as<float>()[1]), std::pow(std::log(4.0), 2), 1e-6);
  EXPECT_NEAR(double(dz.as<float>()[5]), std::log(4.0) / 2, 1e-6);
}

}  // namespace
}  // namespace tessera::ops::router::z_loss
