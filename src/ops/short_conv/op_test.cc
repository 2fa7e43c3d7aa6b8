#include "ops/short_conv/op.h"

#include <limits>

#include "core/parallel.h"
#include "ops/check/gtest_table.h"
#include "ops/short_conv/cases.h"

namespace tessera::ops::short_conv {
namespace {

TESSERA_OP_TABLE_TESTS(ShortConv, table())

struct Outcome {
  std::vector<float> y, dx, d_weight, d_window;
  bool operator==(const Outcome&) const = default;
};

// Forward and backward of documents 0+40+1+59 with the given threads; document 1 filled with `first_document`.
Outcome run(int threads, float first_document) {
  const std::vector<int64_t> offsets{0, 0, 40, 41, 100};
  const Dims d{100, 24, 4};
  Arena arena(1 << 22);
  Context ctx{Device::cpu, arena};
  const auto filled = [&](Shape shape, int64_t step) {
    const View v = arena.allocate(DType::f32, shape);
    for (int64_t i = 0; i < v.elements(); ++i) v.as<float>()[i] = float(i * step % 29 - 14) / 9;
    return v;
  };
  const View x = filled({d.tokens, d.channels}, 7), weight = filled({d.channels, d.width}, 3);
  const View window = filled({4, d.width - 1, d.channels}, 5), dy = filled(x.shape(), 11), y = filled(x.shape(), 1);
  const View dx = filled(x.shape(), 1), d_window = filled(window.shape(), 1), d_weight = filled(weight.shape(), 0);
  std::fill_n(x.as<float>(), 40 * d.channels, first_document);
  const int before = thread_count();
  set_thread_count(threads);
  const Inputs in{x, weight, window, {offsets}};
  forward(ctx, d, in, {y, {}});
  backward(ctx, d, in, {dy}, {dx, d_weight, d_window});
  set_thread_count(before);
  const auto values = [](const View& v) { return std::vector<float>(v.as<float>(), v.as<float>() + v.elements()); };
  return {values(y), values(dx), values(d_weight), values(d_window)};
}

TEST(ShortConv, ThreadsAgreeBitForBit) {
  const Outcome one = run(1, 0.5f);
  EXPECT_EQ(run(2, 0.5f), one);
  EXPECT_EQ(run(5, 0.5f), one);
}

TEST(ShortConv, ADocumentDoesNotFeelNanInItsNeighbour) {
  const Outcome clean = run(2, 0.5f), poisoned = run(2, std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 40 * 24; i < clean.y.size(); ++i) {
    EXPECT_EQ(clean.y[i], poisoned.y[i]);
    EXPECT_EQ(clean.dx[i], poisoned.dx[i]);
  }
}

TEST(ShortConv, UnsupportedWidthIsRefused) {
  Arena arena(1 << 20);
  Context ctx{Device::cpu, arena};
  const View x = arena.allocate(DType::f32, {2, 4}), weight = arena.allocate(DType::f32, {4, 9});
  const std::vector<int64_t> offsets{0, 2};
  EXPECT_THROW(forward(ctx, {2, 4, 9}, {x, weight, {}, {offsets}}, {x, {}}), Error);
}

}  // namespace
}  // namespace tessera::ops::short_conv
