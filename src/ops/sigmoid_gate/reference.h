// Sigmoid gate by definition.
#pragma once

#include <cmath>
#include <vector>

namespace tessera::ops::sigmoid_gate::reference {

inline std::vector<double> forward(const std::vector<double>& x, const std::vector<double>& w) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = x[i] / (1 + std::exp(-w[i]));
  return y;
}

}  // namespace tessera::ops::sigmoid_gate::reference
