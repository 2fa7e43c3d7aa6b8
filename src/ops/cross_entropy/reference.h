// Cross-entropy over x W^T by definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::cross_entropy::reference {

inline std::vector<double> forward(int64_t tokens, int64_t width, int64_t vocabulary, const std::vector<double>& x,
                                   const std::vector<double>& weight, const std::vector<double>& targets) {
  std::vector<double> loss(static_cast<size_t>(tokens)), logits(static_cast<size_t>(vocabulary));
  for (int64_t t = 0; t < tokens; ++t) {
    if (targets[size_t(t)] < 0) continue;
    for (int64_t o = 0; o < vocabulary; ++o) {
      logits[size_t(o)] = 0;
      for (int64_t i = 0; i < width; ++i) logits[size_t(o)] += x[size_t(t * width + i)] * weight[size_t(o * width + i)];
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (double logit : logits) sum += std::exp(logit - top);
    loss[size_t(t)] = (top - logits[size_t(targets[size_t(t)])]) + std::log(sum);
  }
  return loss;
}

}  // namespace tessera::ops::cross_entropy::reference
