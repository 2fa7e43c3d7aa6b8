#include "ops/router/balance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "core/parallel.h"
#include "core/philox.h"
#include "ops/router/bins.h"
#include "ops/router/cases.h"
#include "ops/router/reference.h"

namespace tessera::ops::router {
namespace {

using reference::Values;

constexpr uint64_t kCentreSeed = 2;
constexpr BalanceOptions kCentred{};
constexpr BalanceOptions kUniform{.method = Balance::quantile_uniform, .bins = 1000};

// One layer's router with its counters.
template <class Real>
struct Layer {
  Dims d;  // tokens: of one whole step
  BalanceOptions options;
  Arena arena{int64_t{1} << 28};
  Context ctx{Device::cpu, arena};
  View bias;
  Counters counters;

  Layer(const Dims& dims, const BalanceOptions& o, const Values& b = {}) : d(dims), options(o) {
    bias = arena.allocate_zeroed(dtype_of<Real>, {d.experts});
    for (size_t j = 0; j < b.size(); ++j) bias.as<Real>()[j] = Real(b[j]);
    counters = allocate_counters(arena, d.experts, options);
  }
  // Routes and counts rows [begin, end) of `z` as one micro-batch.
  void micro_batch(const Real* z, int64_t begin, int64_t end) {
    Arena::Scope scope(arena);
    Dims part = d;
    part.tokens = end - begin;
    const Shape selected{part.tokens, d.top_k};
    const View logits(const_cast<Real*>(z) + begin * d.experts, dtype_of<Real>, {part.tokens, d.experts});
    const Outputs out{arena.allocate(DType::i32, selected), arena.allocate(dtype_of<Real>, selected),
                      arena.allocate(dtype_of<Real>, selected), arena.allocate(dtype_of<Real>, {part.tokens}),
                      arena.allocate_zeroed(DType::i64, {1})};
    forward(ctx, part, {logits, bias}, out);
    count(ctx, part, {logits, bias}, out, options, counters);
  }
  BalanceReport step(const std::vector<Real>& z) {
    micro_batch(z.data(), 0, d.tokens);
    return balance(d, options, bias, counters);
  }
  Values bias_values() const { return Values(bias.as<Real>(), bias.as<Real>() + d.experts); }
};

// Logits ~ N(c_j, 1) with c_j ~ N(0, skew^2), the same c_j for every seed.
template <class Real>
std::vector<Real> normal_logits(const Dims& d, uint64_t seed, double skew = 1) {
  const Philox philox(seed, Purpose::test), centres(kCentreSeed, Purpose::test);
  std::vector<Real> centre, z(size_t(d.tokens * d.experts));
  for (int64_t j = 0; j < d.experts; ++j) centre.push_back(Real(skew * centres.normal(uint64_t(j))));
  const int64_t n = int64_t(z.size());
  parallel_ranges((n + 3) / 4, 1024, [&](int64_t begin, int64_t end) {  // four normals of each block of bits
    for (int64_t block = begin; block < end; ++block) {
      const auto bits = philox.block(uint64_t(block));
      for (size_t pair = 0; pair < 2; ++pair) {
        const float radius = std::sqrt(-2 * std::log((float(bits[2 * pair] >> 8) + 0.5f) * 0x1.0p-24f));
        const float angle = float(bits[2 * pair + 1] >> 8) * (6.2831853f * 0x1.0p-24f);
        const int64_t i = 4 * block + 2 * int64_t(pair);
        if (i < n) z[size_t(i)] = centre[size_t(i % d.experts)] + Real(radius * std::cos(angle));
        if (i + 1 < n) z[size_t(i) + 1] = centre[size_t((i + 1) % d.experts)] + Real(radius * std::sin(angle));
      }
    }
  });
  return z;
}

Values logit(const Values& s) {
  Values z;
  for (double v : s) z.push_back(std::log(v / (1 - v)));
  return z;
}

// moe.md 2.6, O1: 8 tokens, 4 experts, k = 1, q = 2.
const Values kStallScores{.90, .50, .30, .10, .80, .60, .20, .15, .70, .65, .40, .05, .85, .30, .55, .25,
                          .40, .75, .35, .20, .30, .70, .45, .12, .20, .66, .60, .33, .15, .25, .72, .41};
constexpr Dims kStall{8, 4, 1};

void expect_near(const Values& got, const Values& want, double limit) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], limit) << i;
}

TEST(QuantileBalance, SmallBatchStallsWithADeadExpert) {
  const Values z = logit(kStallScores);
  auto routing = reference::route(kStall, z, Values(4, 0));
  EXPECT_EQ(reference::loads(kStall, routing), (std::vector<int64_t>{4, 3, 1, 0}));
  expect_near(routing.cutoff, {.50, .60, .65, .55, .40, .45, .60, .41}, 1e-12);
  Values b = reference::centred(reference::exact_bias(kStall, routing));
  expect_near(b, {-0.2025, -0.0625, -0.0025, 0.2675}, 1e-12);
  routing = reference::route(kStall, z, b);
  EXPECT_EQ(reference::loads(kStall, routing), (std::vector<int64_t>{3, 4, 1, 0}));
  b = reference::centred(reference::exact_bias(kStall, routing));
  expect_near(b, {-0.2250, -0.1150, 0.0350, 0.3050}, 1e-12);
  EXPECT_EQ(reference::loads(kStall, reference::route(kStall, z, b)), (std::vector<int64_t>{3, 3, 2, 0}));
  for (int step = 0; step < 50; ++step)
    b = reference::centred(reference::exact_bias(kStall, reference::route(kStall, z, b)));
  expect_near(b, {-0.23, -0.18, 0.07, 0.34}, 1e-12);
  EXPECT_NEAR(reference::dual(kStall, kStallScores, reference::route(kStall, z, b).cutoff, b), 4.88, 1e-12);
  // The optimum's assignment, one expert a token: what the stall misses.
  const int optimum[8] = {0, 0, 1, 2, 3, 1, 3, 2};
  double value = 0;
  for (size_t i = 0; i < 8; ++i) value += kStallScores[i * 4 + size_t(optimum[i])];
  EXPECT_NEAR(value, 4.85, 1e-12);
}

TEST(QuantileBalance, EngineRoutesTheStallInstance) {
  const Values z = logit(kStallScores);
  const std::vector<std::pair<Values, std::vector<int64_t>>> steps{{{0, 0, 0, 0}, {4, 3, 1, 0}},
                                                                   {{-0.2025, -0.0625, -0.0025, 0.2675}, {3, 4, 1, 0}},
                                                                   {{-0.2250, -0.1150, 0.0350, 0.3050}, {3, 3, 2, 0}}};
  for (const auto& [b, load] : steps) {
    Layer<double> layer(kStall, kCentred, b);
    layer.micro_batch(z.data(), 0, 8);
    EXPECT_EQ(std::vector<int64_t>(layer.counters.load.as<int64_t>(), layer.counters.load.as<int64_t>() + 4), load);
  }
}

TEST(QuantileBalance, DualNeverRisesOverHalfSteps) {
  const Dims d{60, 12, 3};
  for (uint64_t seed : {1, 2, 3}) {
    const auto z = normal_logits<double>(d, seed, 2);
    Values b(12, 0), alpha(60, 0);
    double before = std::numeric_limits<double>::infinity();
    for (int step = 0; step < 12; ++step) {
      const auto routing = reference::route(d, z, b);
      const double rows = reference::dual(d, routing.all_scores, routing.cutoff, b);
      b = reference::exact_bias(d, routing);
      const double columns = reference::dual(d, routing.all_scores, routing.cutoff, b);
      EXPECT_LE(rows, before + 1e-12);
      EXPECT_LE(columns, rows + 1e-12);
      before = columns;
    }
  }
}

void expect_same_bits(const View& a, const View& b, const char* what) {
  EXPECT_EQ(std::memcmp(a.data(), b.data(), size_t(a.bytes())), 0) << what;
}

TEST(QuantileBalance, AnySplitIntoMicroBatchesGivesTheSameBits) {
  const Dims d{1000, 40, 3};
  auto z = normal_logits<float>(d, 4);
  z[5 * 40 + 7] = std::numeric_limits<float>::quiet_NaN();  // this row is counted nowhere
  for (const BalanceOptions& options : {kCentred, kUniform}) {
    for (Score score : {Score::sigmoid, Score::softmax}) {
      Dims dims = d;
      dims.score = score;
      Layer<float> whole(dims, options, Values(40, 0.125));
      whole.micro_batch(z.data(), 0, 1000);
      EXPECT_EQ(whole.counters.tokens.as<int64_t>()[0], 999);
      for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 1, 1000}, {0, 333, 333, 700, 1000}}) {
        Layer<float> split(dims, options, Values(40, 0.125));
        for (size_t c = 1; c < cuts.size(); ++c) split.micro_batch(z.data(), cuts[c - 1], cuts[c]);
        expect_same_bits(whole.counters.histogram, split.counters.histogram, "histogram");
        expect_same_bits(whole.counters.load, split.counters.load, "load");
        expect_same_bits(whole.counters.by_bias, split.counters.by_bias, "by_bias");
        balance(dims, options, split.bias, split.counters);
        Layer<float> again(dims, options, Values(40, 0.125));
        again.step(z);
        expect_same_bits(again.bias, split.bias, "bias");
      }
    }
  }
}

// |estimate - exact| <= one bin before centring. For a whole q every value between the q-th and the (q+1)-th margin is
// a quantile, so the distance is to that interval.
template <class Real>
void expect_within_one_bin(const Dims& d, const BalanceOptions& options, const Values& b) {
  const auto z = normal_logits<Real>(d, 9);
  Layer<Real> layer(d, options, b);
  layer.micro_batch(z.data(), 0, d.tokens);
  const auto routing = reference::route(d, Values(z.begin(), z.end()), layer.bias_values());
  const BinLayout<Real> layout(options, layer.bias.template as<Real>(), d.experts);
  const double q = double(d.tokens * d.top_k) / double(d.experts);
  for (int64_t j = 0; j < d.experts; ++j) {
    const ExpertBins bins = layout.of(j);
    const int32_t* row = layer.counters.histogram.template as<int32_t>() + j * options.bins;
    const double estimate = quantile_of(bins, row, q, d.tokens).margin;
    const Values r = reference::margins_of(d, routing, j);
    const double low = r[size_t(std::ceil(q)) - 1], high = r[size_t(std::floor(q))];
    const double position = (bins.coordinate(estimate) - bins.begin) * bins.per_unit();
    const double width = bins.margin_at(position + 1) - bins.margin_at(position - 1);
    EXPECT_LE(estimate, high + width / 2 + 1e-6) << j;
    EXPECT_GE(estimate, low - width / 2 - 1e-6) << j;
    EXPECT_LT(width, options.method == Balance::quantile_uniform ? 0.0061 : 0.3);
  }
}

TEST(QuantileBalance, WithinOneBinOfTheExactQuantile) {
  const Values b{0.2, -0.1, 0, 0.3, -0.4, 0.05, 0.1, -0.15};
  for (int64_t tokens : {100, 101, 400, 2003}) {
    for (const BalanceOptions& options : {kCentred, kUniform}) {
      expect_within_one_bin<float>({tokens, 8, 2}, options, b);
      expect_within_one_bin<double>({tokens, 8, 2}, options, b);
    }
  }
}

TEST(QuantileBalance, ConstantAddedToTheBiasIsCentredAway) {
  const Dims d{500, 8, 2};
  const Values b{0.2, -0.1, 0, 0.3, -0.4, 0.05, 0.1, -0.15};
  Values shifted = b;
  for (double& v : shifted) v += 0.5;
  for (const BalanceOptions& options : {kCentred, kUniform}) {
    const auto z = normal_logits<double>(d, 11);
    Layer<double> a(d, options, b), s(d, options, shifted);
    a.step(z);
    s.step(z);
    expect_near(a.bias_values(), s.bias_values(), 1e-9);
  }
}

TEST(QuantileBalance, EqualScoresLeaveTheBiasAtZero) {
  const Dims d{64, 8, 2};
  for (const BalanceOptions& options : {kCentred, kUniform}) {
    Layer<float> layer(d, options);
    const BalanceReport report = layer.step(std::vector<float>(64 * 8, 0.3f));
    EXPECT_TRUE(report.moved);
    expect_near(layer.bias_values(), Values(8, 0), 1e-15);
    EXPECT_EQ(report.largest_bin_mass, 1.0);  // the warning: the bins cannot separate ties
    EXPECT_EQ(report.dead, 6);
  }
}

// Steps of fresh batches; reports by step. `exact`: the reference estimator in place of the engine's.
std::vector<BalanceReport> stream(const Dims& d, const BalanceOptions& options, double skew, int steps,
                                  bool exact = false) {
  Layer<float> layer(d, options);
  std::vector<BalanceReport> reports;
  for (int step = 0; step < steps; ++step) {
    const auto z = normal_logits<float>(d, 100 + uint64_t(step), skew);
    Values next;
    if (exact) {
      const Values wide(z.begin(), z.end());
      next = reference::centred(reference::exact_bias(d, reference::route(d, wide, layer.bias_values())));
    }
    reports.push_back(layer.step(z));
    for (size_t j = 0; j < next.size(); ++j) layer.bias.as<float>()[j] = float(next[j]);
  }
  return reports;
}

TEST(QuantileBalance, BalancesASyntheticStream) {
  const Dims d{16384, 64, 4};
  for (const BalanceOptions& options : {kCentred, kUniform}) {
    const auto reports = stream(d, options, 1, 15);
    EXPECT_GT(reports[0].max_vio, 3);
    for (size_t i = 2; i < reports.size(); ++i) EXPECT_LT(reports[i].max_vio, 0.35) << i;
    EXPECT_LT(reports[14].max_vio, 1.7 * reports[14].floor);
    EXPECT_NEAR(reports[14].floor, 0.09, 0.002);
    EXPECT_EQ(reports[14].dead, 0);
  }
}

// moe.md 2.4: after 20 steps, centred bins balance as exact quantiles do where uniform bins are too coarse.
TEST(QuantileBalance, CentredBinsBalanceSaturatedScores) {
  const Dims d{8192, 64, 4};
  const BalanceReport exact = stream(d, kCentred, 3, 21, true).back(), centred = stream(d, kCentred, 3, 21).back();
  const BalanceReport uniform = stream(d, kUniform, 3, 21).back();
  EXPECT_LT(centred.max_vio, 2.5 * centred.floor);
  EXPECT_LT(centred.max_vio, 1.2 * exact.max_vio);
  EXPECT_GT(uniform.max_vio, 0.5);
  EXPECT_LT(centred.largest_bin_mass, 0.05);
  EXPECT_GT(uniform.largest_bin_mass, 0.05);
  const BalanceReport centred6 = stream(d, kCentred, 6, 21).back(), uniform6 = stream(d, kUniform, 6, 21).back();
  EXPECT_GT(centred6.min_load, 0.3);
  EXPECT_LT(uniform6.min_load, 0.05);
  EXPECT_LT(centred6.max_vio, uniform6.max_vio / 2);
}

TEST(QuantileBalance, CountingTwiceChangesNothing) {
  const Dims d{301, 12, 3};
  const auto z = normal_logits<float>(d, 21);
  Layer<float> once(d, kCentred), twice(d, kCentred);
  once.step(z);
  twice.micro_batch(z.data(), 0, d.tokens);
  twice.step(z);
  expect_same_bits(once.bias, twice.bias, "bias");
}

TEST(QuantileBalance, FewTokensKeepCounting) {
  const Dims d{20, 8, 2};  // q = 5, below the default of 8
  const auto z = normal_logits<float>(d, 22);
  Layer<float> layer(d, kCentred);
  EXPECT_FALSE(layer.step(z).moved);
  EXPECT_EQ(layer.bias_values(), Values(8, 0));
  EXPECT_EQ(layer.counters.pending_tokens.as<int64_t>()[0], 20);
  layer.micro_batch(z.data(), 0, 20);
  EXPECT_EQ(layer.counters.tokens.as<int64_t>()[0], 20) << "a step's own counts stay apart from those that wait";
  const int64_t* load = layer.counters.load.as<int64_t>();
  EXPECT_EQ(std::accumulate(load, load + 8, int64_t{0}), 40);
  EXPECT_TRUE(balance(d, layer.options, layer.bias, layer.counters).moved);  // q = 10 with both batches
  EXPECT_EQ(layer.counters.tokens.as<int64_t>()[0], 0);
  EXPECT_EQ(layer.counters.pending_tokens.as<int64_t>()[0], 0);
  EXPECT_EQ(layer.counters.histogram.as<int32_t>()[300], 0);
  Layer<float> idle(d, kCentred);
  idle.options.min_tokens = 0;
  EXPECT_FALSE(balance(d, idle.options, idle.bias, idle.counters).moved);  // no token at all
}

// Two steps below min_tokens move the bias as their tokens in one step would.
TEST(QuantileBalance, StepsThatWaitCountAsOne) {
  const Dims half{20, 8, 2}, whole{40, 8, 2};
  const auto z = normal_logits<float>(whole, 27);
  Layer<float> once(whole, kCentred), twice(half, kCentred);
  const BalanceReport want = once.step(z);
  twice.micro_batch(z.data(), 0, 20);
  EXPECT_FALSE(balance(half, twice.options, twice.bias, twice.counters).moved);
  twice.micro_batch(z.data(), 20, 40);
  const BalanceReport got = balance(half, twice.options, twice.bias, twice.counters);
  expect_same_bits(once.bias, twice.bias, "bias");
  EXPECT_EQ(got.max_vio, want.max_vio);
}

TEST(Counters, RestartWithMoreBinsCountsFromZero) {
  const Dims d{20, 8, 2};  // waits for more tokens
  const auto z = normal_logits<float>(d, 28);
  BalanceOptions finer = kCentred;
  finer.bins = 2 * kCentred.bins;
  finer.width = 1e-5;
  Layer<float> changed(d, kCentred), fresh(d, finer);
  changed.counters = allocate_counters(changed.arena, d.experts, kCentred, {.most_bins = finer.bins});
  EXPECT_FALSE(changed.step(z).moved);
  restart(changed.counters, finer);
  changed.options = finer;
  for (Layer<float>* layer : {&changed, &fresh}) {
    layer->micro_batch(z.data(), 0, 20);
    EXPECT_TRUE(layer->step(z).moved);
  }
  expect_same_bits(changed.bias, fresh.bias, "bias");
  finer.bins *= 2;
  EXPECT_THROW(restart(changed.counters, finer), Error) << "no room";
}

TEST(QuantileBalance, EveryExpertSelectedLeavesTheBias) {
  const Dims d{50, 4, 4};
  Layer<float> layer(d, kCentred, {0.5, -0.5, 0, 0});
  const BalanceReport report = layer.step(normal_logits<float>(d, 23));
  EXPECT_FALSE(report.moved);
  EXPECT_EQ(report.max_vio, 0);
  EXPECT_EQ(report.spread, 1);
  EXPECT_EQ(layer.bias_values(), (Values{0.5, -0.5, 0, 0}));
  EXPECT_EQ(layer.counters.load.as<int64_t>()[0], 0) << "a finished step is cleared";
}

TEST(QuantileBalance, LostTokensAreAnError) {
  const Dims d{100, 4, 1};
  Layer<float> layer(d, kCentred);
  const auto z = normal_logits<float>(d, 24);
  layer.micro_batch(z.data(), 0, 100);
  int32_t* row = layer.counters.histogram.as<int32_t>() + 2 * kCentred.bins;
  --*std::find_if(row, row + kCentred.bins, [](int32_t n) { return n > 0; });
  EXPECT_THROW(balance(d, kCentred, layer.bias, layer.counters), Error);
}

TEST(QuantileBalance, SmoothingMovesPartOfTheWay) {
  const Dims d{400, 8, 2};
  const auto z = normal_logits<double>(d, 25);
  const Values b{0.2, -0.1, 0.1, 0.3, -0.4, 0.05, 0, -0.15};
  BalanceOptions half = kUniform;
  half.smoothing = 0.5;
  Layer<double> full(d, kUniform, b), part(d, half, b);
  full.step(z);
  const BalanceReport report = part.step(z);
  Values want = full.bias_values();
  double step = 0;
  for (size_t j = 0; j < 8; ++j) {
    want[j] = 0.5 * want[j] + 0.5 * b[j];
    step = std::max(step, std::fabs(want[j] - b[j]));
  }
  expect_near(part.bias_values(), want, 1e-12);
  EXPECT_NEAR(report.step, step, 1e-12);
}

TEST(SignRule, MovesEachBiasByOneStep) {
  Layer<double> layer(kStall, {.method = Balance::sign, .sign_step = 0.01, .min_tokens = 1});
  EXPECT_FALSE(layer.counters.histogram.present());
  const BalanceReport report = layer.step(logit(kStallScores));  // loads 4 3 1 0, q = 2
  EXPECT_TRUE(report.moved);
  expect_near(layer.bias_values(), {-0.01, -0.01, 0.01, 0.01}, 1e-15);
  EXPECT_DOUBLE_EQ(report.max_vio, 1.0);
  EXPECT_DOUBLE_EQ(report.min_load, 0.0);
  EXPECT_DOUBLE_EQ(report.floor, std::sqrt(std::log(4.0)));
  EXPECT_NEAR(report.spread, 0.02, 1e-15);
  EXPECT_NEAR(report.step, 0.01, 1e-15);
  EXPECT_EQ(report.dead, 1);
}

TEST(NoBalance, ReportsAndClears) {
  Layer<double> layer(kStall, {.method = Balance::none}, {0.1, 0, 0, 0});
  const BalanceReport report = layer.step(logit(kStallScores));
  EXPECT_FALSE(report.moved);
  EXPECT_DOUBLE_EQ(report.max_vio, 1.0);
  EXPECT_EQ(layer.bias_values(), (Values{0.1, 0, 0, 0}));
  EXPECT_EQ(layer.counters.tokens.as<int64_t>()[0], 0);
}

TEST(Counters, LoadsWeightsAndSelectionsByBias) {
  const Dims d{200, 24, 4, 1.5};
  Values b(24, 0);
  b[3] = 0.2;
  b[9] = -0.1;
  const auto z = normal_logits<double>(d, 31);
  const auto with = reference::route(d, z, b), without = reference::route(d, z, Values(24, 0));
  Layer<double> layer(d, kCentred, b);
  layer.micro_batch(z.data(), 0, d.tokens);
  std::vector<int64_t> by_bias(24, 0);
  Values weight(24, 0);
  for (int64_t i = 0; i < d.tokens; ++i) {
    const auto natural = without.experts.begin() + i * d.top_k;
    for (int64_t s = i * d.top_k; s < (i + 1) * d.top_k; ++s) {
      const double j = with.experts[size_t(s)];
      weight[size_t(j)] += with.weights[size_t(s)];
      by_bias[size_t(j)] += std::find(natural, natural + d.top_k, j) == natural + d.top_k ? 1 : 0;
    }
  }
  const int64_t *load = layer.counters.load.as<int64_t>(), *marked = layer.counters.by_bias.as<int64_t>();
  EXPECT_EQ(std::vector<int64_t>(load, load + 24), reference::loads(d, with));
  EXPECT_EQ(std::vector<int64_t>(marked, marked + 24), by_bias);
  EXPECT_GT(std::accumulate(by_bias.begin(), by_bias.end(), int64_t{0}), 20);
  const double* got = layer.counters.weight.as<double>();
  expect_near(Values(got, got + 24), weight, 1e-12);
}

TEST(Counters, WithoutABiasNothingIsSelectedByIt) {
  const Dims d{300, 64, 6};
  Layer<float> layer(d, kCentred);
  auto z = normal_logits<float>(d, 32, 30);  // saturated: many scores are exactly 1 or 0
  layer.micro_batch(z.data(), 0, d.tokens);
  for (int64_t j = 0; j < 64; ++j) EXPECT_EQ(layer.counters.by_bias.as<int64_t>()[j], 0);
}

TEST(Bins, FastAsinhIsWithinItsBound) {
  for (double x = 1e-9; x < 1e17; x *= 1.01) {
    EXPECT_NEAR(double(fast_asinh(float(x))), std::asinh(double(float(x))), 3e-7 + 6e-8 * std::asinh(x));
    EXPECT_EQ(fast_asinh(float(-x)), -fast_asinh(float(x)));
  }
}

TEST(Counters, DryRunTakesTheSameWorkspace) {
  const Dims d{33, 20, 3, 1, true, Score::softmax};
  int64_t peak[2];
  for (Device device : {Device::cpu, Device::dry}) {
    Arena arena = device == Device::dry ? Arena::dry() : Arena(1 << 24);
    Ledger ledger;
    Context ctx{device, arena, &ledger};
    const View z = arena.allocate_zeroed(DType::f32, {33, 20}), b = arena.allocate_zeroed(DType::f32, {20});
    const Outputs out{arena.allocate(DType::i32, {33, 3}), arena.allocate(DType::f32, {33, 3}),
                      arena.allocate(DType::f32, {33, 3}), arena.allocate(DType::f32, {33}),
                      arena.allocate_zeroed(DType::i64, {1})};
    const Counters counters = allocate_counters(arena, 20, kCentred);
    forward(ctx, d, {z, b}, out);
    const int64_t base = arena.used();
    arena.reset_peak();
    ledger.clear();
    count(ctx, d, {z, b}, out, kCentred, counters);
    EXPECT_EQ(arena.peak() - base, ledger.total().workspace_bytes);
    balance(d, kCentred, b, counters);
    peak[device == Device::dry] = arena.peak();
  }
  EXPECT_EQ(peak[0], peak[1]);
}

}  // namespace
}  // namespace tessera::ops::router
