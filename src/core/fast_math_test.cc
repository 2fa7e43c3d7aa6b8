#include "core/fast_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace tessera {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One unit in the last place of a float32 result near `value`, from the denormals up.
double ulp(double value) {
  const float f = std::min(static_cast<float>(std::fabs(value)), std::numeric_limits<float>::max());
  if (f == std::numeric_limits<float>::max()) return 0x1.0p104;
  return double(std::nextafterf(f, kInfinity)) - double(f);
}

// Every 997th float between +-limit, so that each binade is sampled alike: also denormal arguments.
std::vector<float> sampled_floats(float limit) {
  std::vector<float> x;
  for (uint32_t bits = 0; bits <= std::bit_cast<uint32_t>(limit); bits += 997) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-std::bit_cast<float>(bits));
  }
  return x;
}

// Largest error in ulp of the vectorised loop over float against the double function.
template <class Float, class Double>
double worst_ulp(float limit, Float approximate, Double exact) {
  const std::vector<float> x = sampled_floats(limit);
  std::vector<float> y(x.size());
#pragma omp simd
  for (size_t i = 0; i < x.size(); ++i) y[i] = approximate(x[i]);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = exact(double(x[i]));
    if (want > double(std::numeric_limits<float>::max())) {
      EXPECT_EQ(y[i], kInfinity) << x[i];
    } else {
      worst = std::max(worst, std::fabs(double(y[i]) - want) / ulp(want));
    }
  }
  return worst;
}

TEST(FastMath, FloatWithinStatedUlpOfDouble) {
  const double exp = worst_ulp(
      200.0f, [](float x) { return fast::exp(x); }, [](double x) { return std::exp(x); });
  const double sigmoid = worst_ulp(
      200.0f, [](float x) { return fast::sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); });
  const double tanh = worst_ulp(
      50.0f, [](float x) { return fast::tanh(x); }, [](double x) { return std::tanh(x); });
  const double softplus = worst_ulp(
      200.0f, [](float x) { return fast::softplus(x); },
      [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); });
  EXPECT_LE(exp, 1.5);
  EXPECT_LE(sigmoid, 2.5);
  EXPECT_LE(tanh, 1.5);
  EXPECT_LE(softplus, 2.5);
}

TEST(FastMath, Limits) {
  EXPECT_EQ(fast::exp(-kInfinity), 0.0f);
  EXPECT_EQ(fast::exp(-1e30f), 0.0f);
  EXPECT_EQ(fast::exp(kInfinity), kInfinity);
  EXPECT_EQ(fast::exp(0.0f), 1.0f);
  EXPECT_EQ(fast::sigmoid(-kInfinity), 0.0f);
  EXPECT_EQ(fast::sigmoid(kInfinity), 1.0f);
  EXPECT_EQ(fast::sigmoid(0.0f), 0.5f);
  EXPECT_EQ(fast::tanh(-kInfinity), -1.0f);
  EXPECT_EQ(fast::tanh(kInfinity), 1.0f);
  EXPECT_EQ(fast::softplus(-kInfinity), 0.0f);
  EXPECT_EQ(fast::softplus(kInfinity), kInfinity);
  EXPECT_EQ(fast::softplus(1e30f), 1e30f);
}

TEST(FastMath, NanStaysNan) {
  for (const float nan : {kNaN, -kNaN}) {
    EXPECT_TRUE(std::isnan(fast::exp(nan)));
    EXPECT_TRUE(std::isnan(fast::sigmoid(nan)));
    EXPECT_TRUE(std::isnan(fast::tanh(nan)));
    EXPECT_TRUE(std::isnan(fast::softplus(nan)));
  }
}

TEST(FastMath, DoubleIsTheStandardLibrary) {
  for (const double x : {-800.0, -3.5, -1e-9, 0.0, 0.3, 40.0}) {
    EXPECT_EQ(fast::exp(x), std::exp(x));
    EXPECT_EQ(fast::tanh(x), std::tanh(x));
    EXPECT_NEAR(fast::sigmoid(x), 1 / (1 + std::exp(-x)), 1e-16);
    EXPECT_NEAR(fast::softplus(x), std::log1p(std::exp(x)), 1e-14 * (1 + std::fabs(x)));
  }
}

}  // namespace
}  // namespace tessera
