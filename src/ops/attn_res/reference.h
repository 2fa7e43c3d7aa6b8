// Attention Residuals by definition (moe.md 5.1): inputs are the S sources, then query and gain.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::attn_res::reference {

inline std::vector<double> forward(int64_t tokens, int64_t width, double eps,
                                   const std::vector<std::vector<double>>& sources, const std::vector<double>& query,
                                   const std::vector<double>& gain) {
  std::vector<double> h(static_cast<size_t>(tokens * width)), a(sources.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (size_t s = 0; s < sources.size(); ++s) {
      const double* v = sources[s].data() + t * width;
      double square = 0, product = 0;
      for (int64_t i = 0; i < width; ++i) square += v[i] * v[i];
      const double rms = std::sqrt(square / double(width) + eps);
      for (int64_t i = 0; i < width; ++i) product += query[size_t(i)] * gain[size_t(i)] * v[i] / rms;
      a[s] = product;
    }
    const double top = *std::max_element(a.begin(), a.end());
    double sum = 0;
    for (double x : a) sum += std::exp(x - top);
    for (size_t s = 0; s < sources.size(); ++s) {
      const double alpha = std::exp(a[s] - top) / sum;
      for (int64_t i = 0; i < width; ++i) h[size_t(t * width + i)] += alpha * sources[s][size_t(t * width + i)];
    }
  }
  return h;
}

}  // namespace tessera::ops::attn_res::reference
