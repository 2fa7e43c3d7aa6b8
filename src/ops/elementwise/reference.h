// Elementwise sum by definition.
#pragma once

#include <vector>

namespace tessera::ops::elementwise::reference {

inline std::vector<double> add(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> y(a.size());
  for (size_t i = 0; i < y.size(); ++i) y[i] = a[i] + b[i];
  return y;
}

}  // namespace tessera::ops::elementwise::reference
