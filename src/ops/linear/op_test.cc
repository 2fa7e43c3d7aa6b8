#include "ops/linear/op.h"

#include <array>

#include "core/philox.h"
#include "ops/check/gtest_table.h"
#include "ops/gemm/cuda.h"
#include "ops/linear/cases.h"
#include "ops/linear/cuda.h"

namespace tessera::ops::linear {
namespace {

TESSERA_OP_TABLE_TESTS(Linear, table())

View random_view(Arena& arena, Shape shape, uint64_t seed) {
  const View v = arena.allocate(DType::f32, shape);
  const Philox philox(seed, Purpose::test);
  for (int64_t i = 0; i < v.elements(); ++i)
    v.as<float>()[i] = static_cast<float>(philox.normal(static_cast<uint64_t>(i)));
  return v;
}

std::vector<double> values(const View& v) {  // of rows any stride apart
  std::vector<double> out;
  for (int64_t r = 0; r < v.rows(); ++r) {
    for (int64_t i = 0; i < v.row_elements(); ++i) out.push_back(v.as<float>()[r * v.row_stride() + i]);
  }
  return out;
}

double difference(const View& got, const View& want) { return check::relative_error(values(got), values(want)); }

TEST(Linear, ColumnRangesOfWiderMatrices) {
  // x, y, dy and dx are column ranges of one wide row; what stands beside them must stay as it was.
  const Dims d{19, 24, 40};
  Arena arena(1 << 22);
  Context ctx{Device::cpu, arena};
  const int64_t wide = 160;
  const View rows = random_view(arena, {d.tokens, wide}, 1), untouched = random_view(arena, {d.tokens, wide}, 1);
  const View weight = random_view(arena, {d.out, d.in}, 2);
  const View x = rows.column_range(8, d.in), y = rows.column_range(40, d.out), dx = rows.column_range(120, d.in);
  const View x2 = random_view(arena, {d.tokens, d.in}, 3), y2 = arena.allocate(DType::f32, {d.tokens, d.out});
  const View dx2 = arena.allocate(DType::f32, {d.tokens, d.in});
  const View dw = arena.allocate_zeroed(DType::f32, {d.out, d.in}),
             dw2 = arena.allocate_zeroed(DType::f32, {d.out, d.in});
  for (int64_t t = 0; t < d.tokens; ++t) {
    for (int64_t i = 0; i < d.in; ++i) x2.as<float>()[t * d.in + i] = x.as<float>()[t * wide + i];
  }
  forward(ctx, d, {x, weight}, {y});
  forward(ctx, d, {x2, weight}, {y2});
  EXPECT_LE(difference(y, y2), 1e-6);
  backward(ctx, d, {x, weight}, {y}, {dx, false, dw});
  backward(ctx, d, {x2, weight}, {y2}, {dx2, false, dw2});
  EXPECT_LE(difference(dx, dx2), 1e-6);
  EXPECT_LE(difference(dw, dw2), 1e-6);
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 40}, {80, 40}, {144, 16}}) {
    EXPECT_EQ(values(rows.column_range(begin, count)), values(untouched.column_range(begin, count)));
  }
}

TEST(Linear, GradientsNotWantedAreSkippedAndNotCharged) {
  const Dims d{9, 16, 8};
  Arena arena(1 << 20);
  Ledger ledger;
  Context ctx{Device::cpu, arena, &ledger};
  const View x = random_view(arena, {d.tokens, d.in}, 1), weight = random_view(arena, {d.out, d.in}, 2);
  const View dy = random_view(arena, {d.tokens, d.out}, 3), dx = arena.allocate(DType::f32, {d.tokens, d.in});
  const View only_dx = arena.allocate(DType::f32, {d.tokens, d.in});
  const View dw = arena.allocate_zeroed(DType::f32, {d.out, d.in});
  const View only_dw = arena.allocate_zeroed(DType::f32, {d.out, d.in});
  backward(ctx, d, {x, weight}, {dy}, {dx, false, dw});
  EXPECT_EQ(ledger.total().gemm_flops, 2 * 2 * d.tokens * d.in * d.out);
  ledger.clear();
  backward(ctx, d, {x, weight}, {dy}, {only_dx, false, View()});
  backward(ctx, d, {x, weight}, {dy}, {View(), false, only_dw});
  EXPECT_EQ(ledger.total().gemm_flops, 2 * 2 * d.tokens * d.in * d.out);
  EXPECT_EQ(values(dx), values(only_dx));
  EXPECT_EQ(values(dw), values(only_dw));
}

TEST(Linear, ForAGpuAMixedProductSplitsABlockOfRows) {
  const Dims d{100000, 64, 16};
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
  const auto taken = [&](DType x, DType weight, DType y) {
    ledger.clear();
    arena.reset_peak();
    const Arena::Scope scope(arena);
    const View tokens = arena.allocate(x, {d.tokens, d.in}), scores = arena.allocate(y, {d.tokens, d.out});
    const View w = arena.allocate(weight, {d.out, d.in}), dw = arena.allocate(exact_type(x), {d.out, d.in});
    const int64_t used = arena.used();
    forward(ctx, d, {tokens, w}, {scores});
    const int64_t in_forward = arena.peak() - used;
    EXPECT_EQ(in_forward, ledger.total().workspace_bytes);
    arena.reset_peak();
    backward(ctx, d, {tokens, w}, {scores}, {tokens, true, dw});
    const int64_t in_backward = arena.peak() - used;
    EXPECT_EQ(in_forward + in_backward, ledger.total().workspace_bytes);
    return std::array{in_forward, in_backward};
  };
  const std::array same{kGemmWorkspaceBytes, kGemmWorkspaceBytes};
  EXPECT_EQ(taken(DType::bf16, DType::bf16, DType::bf16), same);
  EXPECT_EQ(taken(DType::f32, DType::f32, DType::f32), same);
  // Three parts of the weight and the sums over them; four parts of weight and rows, and sums for the weight.
  const std::array mixed{
      kGemmWorkspaceBytes + 3 * d.out * d.in * 2 + cuda::kSplitRows * 3 * d.out * 4,
      kGemmWorkspaceBytes + 4 * d.out * d.in * 2 + cuda::kSplitRows * 4 * d.out * 2 + 3 * d.out * d.in * 4};
  EXPECT_EQ(taken(DType::bf16, DType::f32, DType::f32), mixed);
  EXPECT_THROW(taken(DType::bf16, DType::f32, DType::bf16), Error);
  EXPECT_THROW(taken(DType::f32, DType::bf16, DType::f32), Error);
  EXPECT_THROW(taken(DType::bf16, DType::bf16, DType::f32), Error) << "no gradient of exact y beside a bf16 weight";
}

TEST(Linear, Bf16Products) {
  if (!cpu_has_bf16_products()) GTEST_SKIP() << "this CPU has no bf16 products";
  // Operands carry 8 bits: each product is off by up to 2^-8, their random sum by about 2e-3 of its size.
  constexpr Types kAllF32{DType::f32, DType::f32, DType::f32};
  constexpr double kLimit = 5e-3;
  const Dims d{70, 96, 130};
  Arena arena(1 << 24);
  Ledger ledger;
  Context exact{Device::cpu, arena}, rounded{Device::cpu, arena, &ledger, Product::bf16};
  const View x = random_view(arena, {d.tokens, d.in}, 1), weight = random_view(arena, {d.out, d.in}, 2);
  const View dy = random_view(arena, {d.tokens, d.out}, 3);
  View y[2], dx[2], dw[2];
  int64_t used = 0;
  for (int b : {0, 1}) {
    y[b] = arena.allocate(DType::f32, {d.tokens, d.out});
    dx[b] = random_view(arena, {d.tokens, d.in}, 4);
    dw[b] = random_view(arena, {d.out, d.in}, 5);
    arena.reset_peak();
    used = arena.used();
    forward(b ? rounded : exact, d, {x, weight}, {y[b]});
    backward(b ? rounded : exact, d, {x, weight}, {dy}, {dx[b], true, dw[b]});
  }
  for (const auto& [got, want] : {std::pair{y[1], y[0]}, {dx[1], dx[0]}, {dw[1], dw[0]}}) {
    EXPECT_LE(difference(got, want), kLimit);
    EXPECT_GT(difference(got, want), 1e-5) << "the operands were not rounded";
  }
  EXPECT_EQ(arena.peak() - used, std::max(costs(d, kAllF32, Pass::forward, Product::bf16).workspace_bytes,
                                          costs(d, kAllF32, Pass::backward, Product::bf16).workspace_bytes));
}

}  // namespace
}  // namespace tessera::ops::linear
