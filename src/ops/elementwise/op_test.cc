#include "ops/elementwise/op.h"

#include "ops/check/gtest_table.h"
#include "ops/elementwise/cases.h"

namespace tessera::ops::elementwise {
namespace {

// No backward of its own: the gradient of a sum is the gradient itself.
TEST(Elementwise, Oracle) {
  for (const auto& c : table().cases) check::expect_all(check::check_oracle(table(), c));
}
TEST(Elementwise, Supported) {
  for (const auto& c : table().cases) check::expect_all(check::check_supported(table(), c));
}

TEST(Elementwise, RefusesOperandsOfOtherShapes) {
  Arena arena(1 << 16);
  Context ctx{Device::cpu, arena};
  const View a = arena.allocate_zeroed(DType::f32, {4, 8}), b = arena.allocate_zeroed(DType::f32, {4, 16});
  EXPECT_THROW(add_to(ctx, b, a), Error);
  EXPECT_THROW(add_to(ctx, b.column_range(0, 8), a), Error);  // strided
}

}  // namespace
}  // namespace tessera::ops::elementwise
