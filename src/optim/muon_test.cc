#include <gtest/gtest.h>

#include <algorithm>

#include "optim/test_slots.h"

namespace tessera::optim {
namespace {

Values multiply(int64_t m, int64_t n, int64_t k, const Values& a, const Values& b) {
  Values c(size_t(m * n), 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      for (int64_t j = 0; j < n; ++j) c[size_t(i * n + j)] += a[size_t(i * k + p)] * b[size_t(p * n + j)];
    }
  }
  return c;
}

Values transpose(int64_t m, int64_t n, const Values& a) {
  Values t(a.size());
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) t[size_t(j * m + i)] = a[size_t(i * n + j)];
  }
  return t;
}

// The formulas of Muon, one matrix, whole products, an actual transpose.
void reference_step(const Options& o, int64_t rows, int64_t cols, double rate, double decay, const Values& g,
                    Values& momentum, Values& w) {
  Values x(g.size());
  double square = 0;
  for (size_t i = 0; i < g.size(); ++i) {
    momentum[i] = o.momentum * momentum[i] + g[i];
    x[i] = o.nesterov ? g[i] + o.momentum * momentum[i] : momentum[i];
    square += x[i] * x[i];
  }
  for (double& v : x) v /= std::sqrt(square) + 1e-7;
  const int64_t a = std::min(rows, cols), b = std::max(rows, cols);
  if (rows > cols) x = transpose(rows, cols, x);
  for (int64_t s = 0; s < o.newton_schulz_steps; ++s) {
    const Values gram = multiply(a, a, b, x, transpose(a, b, x)), gram2 = multiply(a, a, a, gram, gram);
    Values poly(gram.size());
    for (size_t i = 0; i < gram.size(); ++i) poly[i] = -4.7750 * gram[i] + 2.0315 * gram2[i];
    const Values pulled = multiply(a, b, a, poly, x);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + pulled[i];
  }
  if (rows > cols) x = transpose(b == rows ? cols : a, rows, x);
  const double scale = 0.2 * std::sqrt(double(b));
  for (size_t i = 0; i < w.size(); ++i) w[i] -= rate * (scale * x[i] + decay * w[i]);
}

struct MatrixCase {
  int64_t blocks, rows, cols;
};

// Around the panel (64) and tile (256, 512) edges, both orientations, one row or column, and (last two) matrices above
// the size that one thread takes.
const MatrixCase kCases[] = {{1, 1, 1},     {3, 1, 7},     {2, 9, 1},     {1, 16, 16},   {4, 63, 40},
                             {2, 64, 65},   {1, 65, 130},  {2, 130, 65},  {3, 128, 128}, {1, 200, 90},
                             {1, 257, 300}, {1, 150, 520}, {1, 40, 6600}, {1, 6600, 40}};

double worst_error(DType dtype, const MatrixCase& c, const Options& options) {
  Bench bench(dtype);
  const tessera::Shape shape{c.blocks * c.rows, c.cols};
  const Slot slot = bench.slot("w", shape, Rule::muon, c.blocks, 0.1, 7, 0.01);
  Optimizer optimizer({slot}, options);
  optimizer.allocate_state(bench.context);
  Values w = read(slot.value), momentum(w.size(), 0.0);
  const size_t block = size_t(c.rows * c.cols);
  double worst = 0;
  for (int64_t step = 0; step < 2; ++step) {  // the second reads a momentum that is not zero
    bench.fill(slot.gradient, random_values(100 + uint64_t(step), shape.elements(), 0.01));
    const Values before = read(slot.value), g = read(slot.gradient);
    optimizer.step(bench.context, 0.02, step);
    for (size_t at = 0; at < w.size(); at += block) {
      const auto part = [&](const Values& v) { return Values(v.begin() + long(at), v.begin() + long(at + block)); };
      Values m = part(momentum), value = part(before), moved = part(read(slot.value));
      reference_step(options, c.rows, c.cols, 0.02, 0.1, part(g), m, value);
      for (size_t i = 0; i < block; ++i) {  // compared as movements: values are much larger
        value[i] -= before[at + i];
        moved[i] -= before[at + i];
        momentum[at + i] = m[i];
      }
      worst = std::max(worst, relative_error(moved, value));
    }
  }
  return std::max(worst, relative_error(read(optimizer.state()[0].view), momentum));
}

TEST(Muon, EqualsReference) {
  for (const MatrixCase& c : kCases) {
    SCOPED_TRACE(fmt::format("{} blocks of {} x {}", c.blocks, c.rows, c.cols));
    const Options options{.clip_norm = 0};
    EXPECT_LT(worst_error(DType::f64, c, options), 1e-11);
    // Five steps magnify an error in a small singular value by up to 3.4445^5 = 485.
    EXPECT_LT(worst_error(DType::f32, c, options), 3e-5);
  }
}

TEST(Muon, PlainMomentumAndOtherStepCounts) {
  EXPECT_LT(worst_error(DType::f64, {2, 20, 30}, {.nesterov = false, .clip_norm = 0}), 1e-12);
  EXPECT_LT(worst_error(DType::f64, {2, 30, 20}, {.momentum = 0.5, .newton_schulz_steps = 2, .clip_norm = 0}), 1e-12);
}

// Eigenvalues of a symmetric matrix by cyclic Jacobi rotations.
Values eigenvalues(int64_t n, Values a) {
  const auto at = [&](int64_t i, int64_t j) -> double& { return a[size_t(i * n + j)]; };
  for (int sweep = 0; sweep < 30; ++sweep) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (at(p, q) == 0) continue;
        const double theta = (at(q, q) - at(p, p)) / (2 * at(p, q));
        const double t = std::copysign(1 / (std::abs(theta) + std::hypot(theta, 1.0)), theta);
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        for (int64_t k = 0; k < n; ++k) {
          const double kp = at(k, p), kq = at(k, q);
          at(k, p) = c * kp - s * kq;
          at(k, q) = s * kp + c * kq;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double pk = at(p, k), qk = at(q, k);
          at(p, k) = c * pk - s * qk;
          at(q, k) = s * pk + c * qk;
        }
      }
    }
  }
  Values values;
  for (int64_t i = 0; i < n; ++i) values.push_back(at(i, i));
  return values;
}

TEST(Muon, SingularValuesNearOne) {
  // A Gaussian matrix four times as wide as high has singular values within a factor of 3 of each other.
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{24, 96}, {96, 24}}) {
    Bench bench;
    const Slot slot = bench.slot("w", {rows, cols}, Rule::muon, 1, 0, 3, 1e-3);
    bench.fill(slot.value, Values(size_t(rows * cols), 0.0));
    Optimizer optimizer({slot}, {});
    optimizer.allocate_state(bench.context);
    optimizer.step(bench.context, 1 / (0.2 * std::sqrt(96.0)), 0);
    Values x = read(slot.value);
    if (rows > cols) x = transpose(rows, cols, x);
    for (double square : eigenvalues(24, multiply(24, 24, 96, x, transpose(24, 96, x)))) {
      EXPECT_GE(std::sqrt(square), 0.68);
      EXPECT_LE(std::sqrt(square), 1.13);
    }
  }
}

TEST(Muon, BlocksEqualSeparateParametersBitForBit) {
  constexpr int64_t kHeads = 4, kRows = 48, kCols = 80, kBlock = kRows * kCols;
  Bench bench, apart;
  const Slot fused = bench.slot("q", {kHeads * kRows, kCols}, Rule::muon, kHeads, 0.1, 5);
  std::vector<Slot> heads;
  for (int64_t h = 0; h < kHeads; ++h) {
    heads.push_back(apart.slot("q." + std::to_string(h), {kRows, kCols}, Rule::muon, 1, 0.1, 0));
    std::copy_n(fused.value.as<float>() + h * kBlock, kBlock, heads.back().value.as<float>());
    std::copy_n(fused.gradient.as<float>() + h * kBlock, kBlock, heads.back().gradient.as<float>());
  }
  Optimizer one({fused}, {}), many(heads, {});
  one.allocate_state(bench.context);
  many.allocate_state(apart.context);
  for (int64_t step = 0; step < 3; ++step) {
    const StepReport a = one.step(bench.context, 0.01, step), b = many.step(apart.context, 0.01, step);
    EXPECT_EQ(a.gradient_norm, b.gradient_norm);
    EXPECT_LT(a.clip_scale, 1);
  }
  for (int64_t i = 0; i < kHeads * kBlock; ++i) {
    ASSERT_EQ(fused.value.as<float>()[i], heads[size_t(i / kBlock)].value.as<float>()[i % kBlock]) << i;
  }
}

TEST(Muon, StackedExpertsAreSeparateMatrices) {
  Bench bench, flat;
  const Slot experts = bench.slot("w1", {3, 16, 24}, Rule::muon, 3, 0, 9);
  const Slot rows = flat.slot("w1", {48, 24}, Rule::muon, 3, 0, 9);
  Optimizer a({experts}, {}), b({rows}, {});
  a.allocate_state(bench.context);
  b.allocate_state(flat.context);
  a.step(bench.context, 0.01, 0);
  b.step(flat.context, 0.01, 0);
  EXPECT_EQ(read(experts.value), read(rows.value));
  EXPECT_EQ(a.state()[0].view.shape(), (tessera::Shape{3, 16, 24}));
}

TEST(Muon, ZeroGradientStaysZeroAndOnlyDecays) {
  Bench bench;
  const Slot slot = bench.slot("w", {2 * 20, 30}, Rule::muon, 2, 0.5, 11);
  std::fill_n(slot.gradient.as<float>(), 600, 0.0f);  // block 0: an expert that got no token
  const Values before = read(slot.value);
  Optimizer optimizer({slot}, {});
  optimizer.allocate_state(bench.context);
  optimizer.step(bench.context, 0.125, 0);
  for (size_t i = 0; i < 600; ++i) {
    EXPECT_EQ(slot.value.as<float>()[i], float(before[i]) * 0.9375f);
    EXPECT_EQ(optimizer.state()[0].view.as<float>()[i], 0.0f);
  }
  EXPECT_NE(slot.value.as<float>()[600], float(before[600]) * 0.9375f);
}

TEST(Muon, TinyAndHugeGradientsTurnTheSameWay) {
  // The direction may depend on the size of the gradient only through the 1e-7 beside its norm.
  Values first;
  for (double scale : {1e-3, 1.0, 1e12}) {
    Bench bench;
    const Slot slot = bench.slot("w", {32, 48}, Rule::muon, 1, 0, 13, scale);
    Optimizer optimizer({slot}, {.clip_norm = 0});
    optimizer.allocate_state(bench.context);
    const Values before = read(slot.value);
    ASSERT_TRUE(optimizer.step(bench.context, 0.02, 0).finite);
    Values moved = read(slot.value);
    for (size_t i = 0; i < moved.size(); ++i) moved[i] -= before[i];
    if (first.empty()) first = moved;
    EXPECT_LT(relative_error(moved, first), 1e-3);
  }
}

}  // namespace
}  // namespace tessera::optim
