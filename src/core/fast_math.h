// Elementary functions for inner loops: exp, sigmoid, tanh, softplus.
//
// The float versions are branch-free polynomials of a few instructions, so that a `#pragma omp simd` loop around them
// becomes vector code. Over the whole range, denormals included, exp and tanh are within 1.5 ulp and sigmoid and
// softplus within 2.5 ulp of the true value; the limits at +-infinity are exact and a NaN stays one. The double
// versions are the standard library's: double runs prove, they need not be fast.
//
// Polynomials are Chebyshev interpolants of the remainder, of a degree whose error is below 2^-25 of the result. They
// rely on fused multiply-add, which every supported CPU has (x86-64-v3 and up).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera::fast {

// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2.
[[gnu::always_inline]] inline float exp(float x) {
  // Beyond these, exp is 0 and infinity in float32. Written so that a NaN passes.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const float shifted = std::fma(x, 0x1.715476p0f, kRound);
  const float n = shifted - kRound;
  // ln 2 in two floats: the first product is exact inside the fma, the second brings the bits that float lacks.
  const float r = std::fma(n, 1.904654299958e-9f, std::fma(n, -0x1.62e43p-1f, x));
  float p = 1.392617750e-3f;
  p = std::fma(p, r, 8.363174180e-3f);
  p = std::fma(p, r, 4.166655465e-2f);
  p = std::fma(p, r, 1.666657702e-1f);
  p = std::fma(p, r, 5.000000000e-1f);
  const float y = 1.0f + std::fma(p * r, r, r);
  // 2^n in two factors: n runs from -150 (denormal results) to 128, one exponent holds -126 to 127.
  const auto whole = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
  const int32_t half = whole >> 1;
  const auto power = [](int32_t e) { return std::bit_cast<float>((static_cast<uint32_t>(e) + 127u) << 23); };
  return y * power(half) * power(whole - half);
}
inline double exp(double x) { return std::exp(x); }

// 1 / (1 + exp(-x)), from exp(-|x|) so that both tails keep their relative accuracy.
[[gnu::always_inline]] inline float sigmoid(float x) {
  const float e = exp(-std::fabs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
inline double sigmoid(double x) {
  const double e = std::exp(-std::fabs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// Near 0, where 1 - 2 / (exp(2x) + 1) would cancel, an odd polynomial.
[[gnu::always_inline]] inline float tanh(float x) {
  const float a = std::fabs(x), z = x * x;
  const float large = 1.0f - 2.0f / (exp(2.0f * a) + 1.0f);
  float p = -6.096714160e-3f;
  p = std::fma(p, z, 2.099717899e-2f);
  p = std::fma(p, z, -5.385090958e-2f);
  p = std::fma(p, z, 1.333276974e-1f);
  p = std::fma(p, z, -3.333332894e-1f);
  const float small = std::fma(p * z, a, a);
  return std::copysign(a < 0.625f ? small : large, x);
}
inline double tanh(double x) { return std::tanh(x); }

// log(1 + exp(x)) = max(x, 0) + log1p(e), e = exp(-|x|) in (0, 1]; log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3, whose
// series in s^2 keeps the relative accuracy of tiny e.
[[gnu::always_inline]] inline float softplus(float x) {
  const float e = exp(-std::fabs(x));
  const float s = e / (2.0f + e), z = s * s;
  float p = 1.161216464e-1f;
  p = std::fma(p, z, 1.085328789e-1f);
  p = std::fma(p, z, 1.429617900e-1f);
  p = std::fma(p, z, 1.999985317e-1f);
  p = std::fma(p, z, 3.333333366e-1f);
  return (x < 0.0f ? 0.0f : x) + 2.0f * std::fma(p * z, s, s);
}
inline double softplus(double x) { return (x < 0.0 ? 0.0 : x) + std::log1p(std::exp(-std::fabs(x))); }

}  // namespace tessera::fast
