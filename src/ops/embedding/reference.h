// Embedding by definition.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::ops::embedding::reference {

inline std::vector<double> forward(int64_t tokens, int64_t width, const std::vector<double>& ids,
                                   const std::vector<double>& weight) {
  std::vector<double> y(static_cast<size_t>(tokens * width));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      y[size_t(t * width + i)] = weight[size_t(int64_t(ids[size_t(t)]) * width + i)];
    }
  }
  return y;
}

}  // namespace tessera::ops::embedding::reference
