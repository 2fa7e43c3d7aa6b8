#include "ops/l2_norm/op.h"

#include "ops/check/gtest_table.h"
#include "ops/l2_norm/cases.h"

namespace tessera::ops::l2_norm {
namespace {

TESSERA_OP_TABLE_TESTS(L2Norm, table())

TEST(L2Norm, InPlaceForwardAndBackward) {
  // y over x and dx over dy must give the bits of separate memory; the zero row gives y = 0, r = 1000.
  const Dims d{9, 20};
  Arena arena(1 << 20);
  Context ctx{Device::cpu, arena};
  const auto filled = [&](int64_t step) {
    const View v = arena.allocate(DType::f32, {d.rows, d.width});
    for (int64_t i = 0; i < v.elements(); ++i) v.as<float>()[i] = float(i * step % 13) - 6.0f;
    return v;
  };
  const View x = filled(5), x2 = filled(5), dy = filled(7), dy2 = filled(7), y = filled(1), dx = filled(1);
  std::fill_n(x.as<float>(), d.width, 0.0f);
  std::fill_n(x2.as<float>(), d.width, 0.0f);
  Saved saved = allocate_saved(ctx, d, DType::f32), saved2 = allocate_saved(ctx, d, DType::f32);
  forward(ctx, d, {x}, {y}, &saved);
  forward(ctx, d, {x2}, {x2}, &saved2);
  backward(ctx, d, {y}, saved, {dy}, {dx});
  backward(ctx, d, {x2}, saved2, {dy2}, {dy2});
  for (int64_t i = 0; i < y.elements(); ++i) {
    EXPECT_EQ(y.as<float>()[i], x2.as<float>()[i]);
    EXPECT_EQ(dx.as<float>()[i], dy2.as<float>()[i]);
  }
  for (int64_t i = 0; i < d.width; ++i) EXPECT_EQ(y.as<float>()[i], 0.0f);
  EXPECT_NEAR(saved.rnorm.as<float>()[0], 1000.0f, 1e-3f);
}

}  // namespace
}  // namespace tessera::ops::l2_norm
