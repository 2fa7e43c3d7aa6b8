// Expert products by definition, in float64: token by token, slot by slot.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/experts/op.h"
#include "ops/glu/reference.h"

namespace tessera::ops::experts::reference {

using Values = std::vector<double>;

// indices, weights: (T, k); w1, w3: (E, F, L); w2: (E, L, F).
inline Values forward(const Dims& d, const Values& x, const Values& indices, const Values& weights, const Values& w1,
                      const Values& w3, const Values& w2) {
  const auto L = size_t(d.width), F = size_t(d.hidden), k = size_t(d.top_k);
  Values y(x.size(), 0.0), h(F);
  for (size_t t = 0; t < size_t(d.tokens); ++t) {
    for (size_t slot = t * k; slot < (t + 1) * k; ++slot) {
      if (indices[slot] < 0) continue;
      const size_t at = size_t(indices[slot]) * F * L;
      for (size_t f = 0; f < F; ++f) {
        double gate = 0, up = 0;
        for (size_t l = 0; l < L; ++l) {
          gate += w1[at + f * L + l] * x[t * L + l];
          up += w3[at + f * L + l] * x[t * L + l];
        }
        h[f] = glu::reference::value(d.activation, gate, up);
      }
      for (size_t l = 0; l < L; ++l) {
        for (size_t f = 0; f < F; ++f) y[t * L + l] += weights[slot] * w2[at + l * F + f] * h[f];
      }
    }
  }
  return y;
}

}  // namespace tessera::ops::experts::reference
