// L2 norm by definition.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::l2_norm::reference {

inline std::vector<double> forward(int64_t rows, int64_t width, double epsilon, const std::vector<double>& x) {
  std::vector<double> y(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    double square = 0;
    for (int64_t i = 0; i < width; ++i) square += x[size_t(r * width + i)] * x[size_t(r * width + i)];
    for (int64_t i = 0; i < width; ++i)
      y[size_t(r * width + i)] = x[size_t(r * width + i)] / std::sqrt(square + epsilon);
  }
  return y;
}

}  // namespace tessera::ops::l2_norm::reference
