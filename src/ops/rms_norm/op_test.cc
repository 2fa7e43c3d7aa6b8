#include "ops/rms_norm/op.h"

#include "ops/check/gtest_table.h"
#include "ops/rms_norm/cases.h"

namespace tessera::ops::rms_norm {
namespace {

TESSERA_OP_TABLE_TESTS(RmsNorm, table())

TEST(RmsNorm, StridedRowsAndGradientInPlace) {
  // A column range of a wider matrix, its gradient written over dy: both must equal the contiguous result bit for bit.
  const Dims d{9, 16, 1e-6};
  Arena arena(1 << 20);
  Context ctx{Device::cpu, arena};
  const View wide = arena.allocate(DType::f32, {d.rows, 24}), x = arena.allocate(DType::f32, {d.rows, d.width});
  const View weight = arena.allocate(DType::f32, {d.width}), y = arena.allocate(DType::f32, {d.rows, d.width});
  const View y2 = arena.allocate(DType::f32, {d.rows, d.width}), dx = arena.allocate(DType::f32, {d.rows, d.width});
  const View dw = arena.allocate_zeroed(DType::f32, {d.width}), dw2 = arena.allocate_zeroed(DType::f32, {d.width});
  for (int64_t i = 0; i < d.width; ++i) weight.as<float>()[i] = 1.0f + float(i) / 7;
  for (int64_t r = 0; r < d.rows; ++r) {
    for (int64_t i = 0; i < d.width; ++i) {
      x.as<float>()[r * d.width + i] = wide.as<float>()[r * 24 + 4 + i] = float((r * 31 + i * 17) % 13) - 6.0f;
    }
  }
  Saved saved = allocate_saved(ctx, d, DType::f32), saved2 = allocate_saved(ctx, d, DType::f32);
  forward(ctx, d, {x, weight}, {y}, &saved);
  forward(ctx, d, {wide.column_range(4, d.width), weight}, {y2}, &saved2);
  backward(ctx, d, {x, weight}, saved, {y}, {dx, dw});
  backward(ctx, d, {wide.column_range(4, d.width), weight}, saved2, {y2}, {y2, dw2});
  for (int64_t i = 0; i < dx.elements(); ++i) EXPECT_EQ(dx.as<float>()[i], y2.as<float>()[i]);
  for (int64_t i = 0; i < d.width; ++i) EXPECT_EQ(dw.as<float>()[i], dw2.as<float>()[i]);
}

}  // namespace
}  // namespace tessera::ops::rms_norm
