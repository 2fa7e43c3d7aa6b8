// Order, mixer and packer: the pure functions under the plan.
#include "data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/philox.h"
#include "data/mixer.h"
#include "data/order.h"

namespace tessera::data {
namespace {

TEST(Order, IsABijection) {
  for (const int64_t n :
       {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{5}, int64_t{1000}, (int64_t{1} << 20) + 7}) {
    const Permutation order(n, 17, 2, 3);
    std::vector<bool> seen(static_cast<size_t>(n), false);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t element = order(i);
      ASSERT_GE(element, 0);
      ASSERT_LT(element, n);
      ASSERT_FALSE(seen[static_cast<size_t>(element)]);
      seen[static_cast<size_t>(element)] = true;
      ASSERT_EQ(order.inverse(element), i);
    }
  }
}

TEST(Order, GoldenVectors) {
  const auto first = [](int64_t n, uint64_t seed, uint64_t source, uint64_t epoch) {
    const Permutation order(n, seed, source, epoch);
    std::vector<int64_t> values;
    for (int64_t i = 0; i < std::min<int64_t>(n, 5); ++i) values.push_back(order(i));
    return values;
  };
  EXPECT_EQ(first(5, 1, 0, 0), (std::vector<int64_t>{1, 2, 0, 3, 4}));
  EXPECT_EQ(first(1000, 1, 0, 0), (std::vector<int64_t>{424, 433, 641, 194, 801}));
  EXPECT_EQ(first(1000, 1, 0, 1), (std::vector<int64_t>{526, 229, 555, 606, 457}));
  EXPECT_EQ(first(1000, 1, 1, 0), (std::vector<int64_t>{835, 625, 272, 935, 815}));
  EXPECT_EQ(first(int64_t{1} << 40, 2, 0, 0),
            (std::vector<int64_t>{556316502121, 539766813963, 616055788089, 930012618216, 203226679235}));
}

TEST(Order, LooksRandom) {
  // Neighbours must be apart by n/3 on average, as independent uniform draws are (standard error about n/1300).
  const int64_t n = 100'000;
  const Permutation order(n, 5, 0, 0);
  double sum = 0;
  for (int64_t i = 0; i + 1 < n; ++i) sum += std::abs(double(order(i + 1) - order(i)));
  EXPECT_NEAR(sum / double(n - 1) / double(n), 1.0 / 3, 0.005);
}

TEST(Mixer, KeepsTheBound) {
  const Philox random(3, Purpose::test);
  uint64_t draw = 0;
  for (const int sources : {2, 3, 7, 20}) {
    std::vector<double> weights;
    for (int s = 0; s < sources; ++s) weights.push_back(random.uniform(draw++));
    const int64_t context = 8192;
    Mixer mixer(weights, context);
    for (int i = 0; i < 250'000; ++i) {
      const int s = mixer.choose();
      mixer.give(s, i % 3 == 0 ? 1 + int64_t(random.bits(draw++) % uint64_t(context)) : context);
      const double gap = double(mixer.given(s)) - mixer.weight(s) * double(mixer.total());
      ASSERT_LE(std::abs(gap), double(context * (sources - 1)));
    }
    for (int s = 0; s < sources; ++s) {
      EXPECT_LE(std::abs(double(mixer.given(s)) - mixer.weight(s) * double(mixer.total())),
                double(context * (sources - 1)));
    }
  }
}

TEST(Mixer, RationalWeightsAreExactAfterARound) {
  Mixer mixer({1, 2, 5}, 100);
  for (int i = 0; i < 8 * 1000; ++i) mixer.give(mixer.choose(), 100);
  EXPECT_EQ(mixer.given(0), 100'000);
  EXPECT_EQ(mixer.given(1), 200'000);
  EXPECT_EQ(mixer.given(2), 500'000);
}

TEST(Mixer, DroppedWeightGoesToTheOthersInProportion) {
  Mixer mixer({5, 1, 3, 0}, 10);
  EXPECT_EQ(mixer.choose(), 0);
  mixer.drop(0);
  EXPECT_DOUBLE_EQ(mixer.weight(1), 0.25);
  for (int i = 0; i < 4000; ++i) mixer.give(mixer.choose(), 10);
  EXPECT_EQ(mixer.given(1), 10'000);
  EXPECT_EQ(mixer.given(2), 30'000);
  mixer.drop(1);
  mixer.drop(2);
  EXPECT_EQ(mixer.choose(), -1);  // weight 0 from the start is never chosen
}

TEST(Cutting, Lengths) {
  using Lengths = std::vector<int64_t>;
  const int64_t c = 8192;
  EXPECT_EQ(cut_lengths(1, c), Lengths{1});
  EXPECT_EQ(cut_lengths(c, c), Lengths{c});
  EXPECT_EQ(cut_lengths(c + 1, c), (Lengths{4097, 4096}));  // no orphan of 1
  EXPECT_EQ(cut_lengths(c + 1023, c), (Lengths{4608, 4607}));
  EXPECT_EQ(cut_lengths(c + 1024, c), (Lengths{c, 1024}));
  EXPECT_EQ(cut_lengths(3 * c + 5, c), (Lengths{c, c, 4099, 4098}));
  EXPECT_EQ(cut_lengths(3 * c, c), (Lengths{c, c, c}));
  EXPECT_EQ(cut_lengths(64 + 8, 64), (Lengths{64, 8}));  // C/8 below 8,192
  EXPECT_EQ(cut_lengths(64 + 7, 64), (Lengths{36, 35}));
  EXPECT_EQ(cut_lengths(5, 2), (Lengths{2, 2, 1}));
  for (int64_t context = 2; context < 40; ++context) {
    for (int64_t length = 1; length < 200; ++length) {
      const Lengths pieces = cut_lengths(length, context);
      EXPECT_EQ(std::accumulate(pieces.begin(), pieces.end(), int64_t{0}), length);
      for (const int64_t piece : pieces) {
        EXPECT_GE(piece, 1);
        EXPECT_LE(piece, context);
      }
    }
  }
}

void expect_valid(const Bins& bins, const std::vector<int64_t>& lengths, int64_t capacity) {
  std::vector<int> seen(lengths.size(), 0);
  for (int64_t b = 0; b < bins.count(); ++b) {
    int64_t sum = 0;
    EXPECT_FALSE(bins.bin(b).empty());
    for (const int64_t item : bins.bin(b)) {
      ++seen[static_cast<size_t>(item)];
      sum += lengths[static_cast<size_t>(item)];
    }
    EXPECT_LE(sum, capacity);
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
}

// Lengths as documents have them: log-normal, median 600, sigma 1.2; what is over the context is cut first.
std::vector<int64_t> log_normal_pieces(int64_t context) {
  const Philox random(11, Purpose::test);
  std::vector<int64_t> pieces;
  for (uint64_t i = 0; i < 65'536; ++i) {
    const int64_t length = std::max<int64_t>(16, std::llround(600 * std::exp(1.2 * random.normal(i))));
    for (const int64_t piece : cut_lengths(length, context)) pieces.push_back(piece);
  }
  return pieces;
}

TEST(Packing, PaddingOnLogNormalLengths) {
  for (const auto& [context, limit] : {std::pair<int64_t, double>{8192, 0.0005}, {65'536, 0.002}}) {
    const std::vector<int64_t> lengths = log_normal_pieces(context);
    const Bins bins = pack_best_fit(lengths, context);
    expect_valid(bins, lengths, context);
    const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    const double padding = 1 - double(tokens) / double(bins.count() * context);
    EXPECT_LE(padding, limit) << context;
    RecordProperty("padding_" + std::to_string(context), std::to_string(padding));
  }
}

// Fewest bins by dynamic programming over subsets: (bins, fill of the last) for each set of items.
int64_t fewest_bins(const std::vector<int64_t>& lengths, int64_t capacity) {
  const size_t n = lengths.size();
  std::vector<std::pair<int64_t, int64_t>> best(size_t{1} << n, {int64_t(n) + 1, 0});
  best[0] = {0, capacity};
  for (size_t set = 0; set < best.size(); ++set) {
    for (size_t i = 0; i < n; ++i) {
      if (set >> i & 1) continue;
      auto [bins, fill] = best[set];
      if (fill + lengths[i] <= capacity) {
        fill += lengths[i];
      } else {
        ++bins;
        fill = lengths[i];
      }
      best[set | size_t{1} << i] = std::min(best[set | size_t{1} << i], {bins, fill});
    }
  }
  return best.back().first;
}

TEST(Packing, IsNearTheOptimum) {
  const Philox random(7, Purpose::test);
  uint64_t draw = 0;
  int optimal = 0, trials = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const size_t n = 1 + random.bits(draw++) % 10;
    std::vector<int64_t> lengths;
    for (size_t i = 0; i < n; ++i) lengths.push_back(1 + int64_t(random.bits(draw++) % 60));
    const Bins bins = pack_best_fit(lengths, 64);
    expect_valid(bins, lengths, 64);
    const int64_t fewest = fewest_bins(lengths, 64);
    EXPECT_LE(9 * bins.count(), 11 * fewest + 6);  // the proven bound of best fit decreasing
    optimal += bins.count() == fewest ? 1 : 0;
    ++trials;
  }
  EXPECT_GE(optimal, trials * 95 / 100);
}

TEST(Packing, EdgeCases) {
  EXPECT_EQ(pack_best_fit({}, 16).count(), 0);
  const std::vector<int64_t> full{16, 16};
  EXPECT_EQ(pack_best_fit(full, 16).count(), 2);
  const std::vector<int64_t> mixed{1, 15, 8, 8, 16};
  const Bins bins = pack_best_fit(mixed, 16);
  EXPECT_EQ(bins.count(), 3);
  EXPECT_EQ(bins.items, (std::vector<int64_t>{4, 1, 0, 2, 3}));
  // A capacity of a million: the set of rooms has four levels, and lengths meet every one of them.
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 2000; ++i) lengths.push_back(1 + (i * i * i * 7919) % (int64_t{1} << 20));
  expect_valid(pack_best_fit(lengths, int64_t{1} << 20), lengths, int64_t{1} << 20);
}

}  // namespace
}  // namespace tessera::data
