// Short convolution by definition: documents one by one, the window laid before the tokens.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::short_conv::reference {

struct Result {
  std::vector<double> y;             // (T, G)
  std::vector<double> final_window;  // (N, W-1, G)
};

// `window` (N, W-1, G), empty: zeros.
inline Result forward(int64_t channels, int64_t width, const std::vector<int64_t>& offsets,
                      const std::vector<double>& x, const std::vector<double>& weight,
                      const std::vector<double>& window) {
  Result result{std::vector<double>(x.size()), {}};
  const int64_t history = (width - 1) * channels;
  for (int64_t n = 0; n + 1 < int64_t(offsets.size()); ++n) {
    std::vector<double> p(size_t(history), 0.0);
    if (!window.empty()) p.assign(window.begin() + n * history, window.begin() + (n + 1) * history);
    const int64_t begin = offsets[size_t(n)], length = offsets[size_t(n) + 1] - begin;
    p.insert(p.end(), x.begin() + begin * channels, x.begin() + (begin + length) * channels);
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t g = 0; g < channels; ++g) {
        double a = 0;
        for (int64_t j = 0; j < width; ++j) a += weight[size_t(g * width + j)] * p[size_t((t + j) * channels + g)];
        result.y[size_t((begin + t) * channels + g)] = a / (1 + std::exp(-a));
      }
    }
    result.final_window.insert(result.final_window.end(), p.end() - history, p.end());
  }
  return result;
}

}  // namespace tessera::ops::short_conv::reference
