// Linear by definition.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::ops::linear::reference {

inline std::vector<double> forward(int64_t tokens, int64_t in, int64_t out, const std::vector<double>& x,
                                   const std::vector<double>& weight) {
  std::vector<double> y(static_cast<size_t>(tokens * out));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += x[size_t(t * in + i)] * weight[size_t(o * in + i)];
      y[size_t(t * out + o)] = sum;
    }
  }
  return y;
}

}  // namespace tessera::ops::linear::reference
