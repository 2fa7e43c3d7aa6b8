// RMSNorm by definition.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::rms_norm::reference {

inline std::vector<double> forward(int64_t rows, int64_t width, double eps, const std::vector<double>& x,
                                   const std::vector<double>& weight) {
  std::vector<double> y(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    double square = 0;
    for (int64_t i = 0; i < width; ++i) square += x[size_t(r * width + i)] * x[size_t(r * width + i)];
    const double rstd = 1 / std::sqrt(square / double(width) + eps);
    for (int64_t i = 0; i < width; ++i) y[size_t(r * width + i)] = x[size_t(r * width + i)] * rstd * weight[size_t(i)];
  }
  return y;
}

}  // namespace tessera::ops::rms_norm::reference
