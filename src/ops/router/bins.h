// Bins of the margins r = cutoff - s of one step, for counting and for reading the quantile back: moe.md 2.2 and 2.4.
//
//   coordinate  y = r (uniform)  or  y = asinh((r - b_j) / h) (centred on expert j's bias)
//   bin         t = floor((y - y(lo)) * B / (y(hi) - y(lo))), clamped to [0, B)
//
// lo = min b - 1 and hi = max b + 1 enclose every margin, since s is in (0, 1). Both are functions of the bias, so the
// counters carry no range. Edges are computed in float64 and bins in the working type: a margin within rounding (1e-6
// of a coordinate unit) of an edge may count in the bin beside it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "ops/router/balance.h"

namespace tessera::ops::router {

// Bins of one expert, in float64.
struct ExpertBins {
  bool centred;
  double bias, width;  // b_j, h
  double begin, end;   // y(lo), y(hi)
  int64_t count;       // B

  double per_unit() const { return static_cast<double>(count) / (end - begin); }
  double coordinate(double r) const { return centred ? std::asinh((r - bias) / width) : r; }
  double margin(double y) const { return centred ? bias + width * std::sinh(y) : y; }
  // The margin at `position` bins (a real number) from the low end.
  double margin_at(double position) const { return margin(begin + position / per_unit()); }
};

struct Quantile {
  double margin;    // bhat_j
  double bin_mass;  // share of tokens in its bin; 1 for an outermost bin, whose true extent is unknown
};

// The margin that q of the counted margins lie below, interpolated inside its bin. `histogram` sums to `tokens` >= q >
// 0.
inline Quantile quantile_of(const ExpertBins& bins, const int32_t* histogram, double q, int64_t tokens) {
  const auto target = static_cast<int64_t>(std::ceil(q));
  int64_t below = 0, t = 0;
  while (below + histogram[t] < target) below += histogram[t++];
  const double in_bin = histogram[t];
  const double fraction = std::clamp((q - static_cast<double>(below)) / in_bin, 0.0, 1.0);
  const bool outermost = t == 0 || t == bins.count - 1;
  return {bins.margin_at(static_cast<double>(t) + fraction), outermost ? 1.0 : in_bin / static_cast<double>(tokens)};
}

template <class Real>
class BinLayout {
 public:
  BinLayout(const BalanceOptions& options, const Real* bias, int64_t experts) : options_(options), bias_(bias) {
    const auto [min, max] = std::minmax_element(bias, bias + experts);
    low_ = *min - 1;
    high_ = *max + 1;
  }
  ExpertBins of(int64_t expert) const {
    ExpertBins bins{
        options_.method == Balance::quantile_centred, double(bias_[expert]), options_.width, 0, 0, options_.bins};
    bins.begin = bins.coordinate(double(low_));
    bins.end = bins.coordinate(double(high_));
    return bins;
  }

 private:
  const BalanceOptions& options_;
  const Real* bias_;
  Real low_, high_;
};

// asinh for vector loops; absolute error 3e-7 over |x| < 1e18 (a centred bin is some 0.04 wide).
[[gnu::always_inline]] inline float fast_asinh(float x) {
  const float a = std::fabs(x), u = a + std::sqrt(std::fma(a, a, 1.0f));  // asinh(a) = log(u), u >= 1
  // u = 2^n m with m in [1/sqrt 2, sqrt 2); log(m) = 2 atanh((m - 1) / (m + 1)) by its series.
  const uint32_t bits = std::bit_cast<uint32_t>(u), shifted = bits - 0x3f3504f3u;
  const auto n = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
  const float m = std::bit_cast<float>((shifted & 0x007fffffu) + 0x3f3504f3u);
  const float q = (m - 1.0f) / (m + 1.0f), z = q * q;
  float p = 1.0f / 9.0f;
  p = std::fma(p, z, 1.0f / 7.0f);
  p = std::fma(p, z, 1.0f / 5.0f);
  p = std::fma(p, z, 1.0f / 3.0f);
  const float log = std::fma(n, 0.69314718f, 2.0f * std::fma(p * z, q, q));
  return std::copysign(log, x);
}
inline double fast_asinh(double x) { return std::asinh(x); }

}  // namespace tessera::ops::router
