#include "optim/qk_clip.h"

#include <gtest/gtest.h>

#include <limits>

#include "optim/test_slots.h"

namespace tessera::optim {
namespace {

constexpr QkClip kDims{.heads = 3, .nope_dim = 5, .rope_dim = 2, .value_dim = 4, .threshold = 100};
constexpr int64_t kInputs = 6, kLatent = 7;

// logit_h = <Wq_nope x, Wk_nope c> + <Wq_pe x, k_shared>, unscaled.
double logit(const View& q_proj, const View& kv_b, int64_t head, const Values& x, const Values& c, const Values& k) {
  const auto row = [](const View& w, int64_t r, const Values& in) {
    double sum = 0;
    for (int64_t i = 0; i < w.dim(1); ++i) sum += w.as<double>()[r * w.row_stride() + i] * in[size_t(i)];
    return sum;
  };
  double sum = 0;
  const int64_t q_row = head * (kDims.nope_dim + kDims.rope_dim), kv_row = head * (kDims.nope_dim + kDims.value_dim);
  for (int64_t i = 0; i < kDims.nope_dim; ++i) sum += row(q_proj, q_row + i, x) * row(kv_b, kv_row + i, c);
  for (int64_t i = 0; i < kDims.rope_dim; ++i) sum += row(q_proj, q_row + kDims.nope_dim + i, x) * k[size_t(i)];
  return sum;
}

struct Weights : Bench {
  Weights() : Bench(DType::f64) {
    max_logit = arena.allocate(dtype, {kDims.heads});
    q_proj = arena.allocate(dtype, {kDims.heads * (kDims.nope_dim + kDims.rope_dim), kInputs});
    // A column range of a wider matrix: rows lie further apart than they are long.
    kv_b = arena.allocate_zeroed(dtype, {kDims.heads * (kDims.nope_dim + kDims.value_dim), kLatent + 2})
               .column_range(1, kLatent);
    fill(q_proj, random_values(1, q_proj.elements()));
    for (int64_t r = 0; r < kv_b.dim(0); ++r) fill(kv_b.row_range(r, 1), random_values(10 + uint64_t(r), kLatent));
  }
  int64_t clip() { return qk_clip(context, kDims, std::vector<QkClipLayer>{{max_logit, q_proj, kv_b}}); }
  View max_logit, q_proj, kv_b;
};

TEST(QkClip, LogitsShrinkByGamma) {
  Weights w;
  write<double>(w.max_logit, {250, 100, 400});
  const Values x = random_values(50, kInputs), c = random_values(51, kLatent), k = random_values(52, kDims.rope_dim);
  Values before;
  for (int64_t h = 0; h < kDims.heads; ++h) before.push_back(logit(w.q_proj, w.kv_b, h, x, c, k));
  EXPECT_EQ(w.clip(), 2);
  const Values gamma{0.4, 1, 0.25};
  for (int64_t h = 0; h < kDims.heads; ++h) {
    const double wanted = gamma[size_t(h)] * before[size_t(h)];
    EXPECT_NEAR(logit(w.q_proj, w.kv_b, h, x, c, k), wanted, 1e-14 * std::abs(before[size_t(h)])) << h;
  }
}

TEST(QkClip, TouchesOnlyQueryAndKeyRowsOfClippedHeads) {
  Weights w, kept;
  write<double>(w.max_logit, {-std::numeric_limits<double>::infinity(), 400, 99});
  EXPECT_EQ(w.clip(), 1);
  const auto factor = [&](const View& now, const View& then, int64_t row) {
    return now.as<double>()[row * now.row_stride() + 3] / then.as<double>()[row * then.row_stride() + 3];
  };
  for (int64_t row = 0; row < w.q_proj.dim(0); ++row) {
    const double wanted = row / 7 != 1 ? 1 : row % 7 < 5 ? 0.5 : 0.25;
    EXPECT_EQ(factor(w.q_proj, kept.q_proj, row), wanted) << row;
  }
  for (int64_t row = 0; row < w.kv_b.dim(0); ++row) {
    EXPECT_EQ(factor(w.kv_b, kept.kv_b, row), row / 9 == 1 && row % 9 < 5 ? 0.5 : 1) << row;
  }
}

TEST(QkClip, RefusesLogitsThatAreNotNumbers) {
  for (double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    Weights w, kept;
    write<double>(w.max_logit, {200, bad, 1});
    EXPECT_THROW(w.clip(), Error);
    EXPECT_EQ(read(w.q_proj), read(kept.q_proj));
  }
}

TEST(QkClip, DryChargesAndTouchesNothing) {
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger};
  const View logits = arena.allocate(DType::f32, {kDims.heads});
  const View q = arena.allocate(DType::f32, {21, kInputs}), kv = arena.allocate(DType::f32, {27, kLatent});
  const std::vector<QkClipLayer> layers(1, QkClipLayer{logits, q, kv});
  EXPECT_EQ(qk_clip(ctx, kDims, layers), 0);
  EXPECT_EQ(ledger.entries().at({"qk_clip", Pass::backward}).costs.vector_flops, 21 * kInputs + 15 * kLatent);
}

TEST(QkClip, LayersAreClippedEachByItsOwnLogits) {
  Weights first, second, kept;
  write<double>(first.max_logit, {250, 100, 400});
  write<double>(second.max_logit, {1, 101, 1});
  EXPECT_EQ(qk_clip(first.context, kDims,
                    std::vector<QkClipLayer>{{first.max_logit, first.q_proj, first.kv_b},
                                             {second.max_logit, second.q_proj, second.kv_b}}),
            3);
  EXPECT_EQ(read(second.q_proj.row_range(0, 7)), read(kept.q_proj.row_range(0, 7)));
  EXPECT_NE(read(second.q_proj.row_range(7, 7)), read(kept.q_proj.row_range(7, 7)));
  EXPECT_NE(read(first.q_proj.row_range(0, 7)), read(kept.q_proj.row_range(0, 7)));
  EXPECT_EQ(qk_clip(first.context, kDims, {}), 0);
}

TEST(QkClip, ForAGpuFactorsAndOutcomesAreTheWorkspace) {
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
  const std::vector<QkClipLayer> layers(5, QkClipLayer{.max_logit = arena.allocate(DType::f32, {kDims.heads}),
                                                       .q_proj = arena.allocate(DType::f32, {21, kInputs}),
                                                       .kv_b = arena.allocate(DType::f32, {27, kLatent}),
                                                       .q_copy = arena.allocate(DType::bf16, {21, kInputs})});
  const int64_t used = arena.used();
  EXPECT_EQ(qk_clip(ctx, kDims, layers), 0);
  EXPECT_EQ(arena.peak() - used, Arena::aligned(5 * 3 * 2 * 4) + Arena::aligned(5 * 3 * 4));
  EXPECT_EQ(ledger.total().workspace_bytes, arena.peak() - used);
  EXPECT_EQ(ledger.total().bytes_moved, 5 * (4 * (2 * (21 * kInputs + 15 * kLatent) + 3) + 2 * 21 * kInputs));
}

}  // namespace
}  // namespace tessera::optim
