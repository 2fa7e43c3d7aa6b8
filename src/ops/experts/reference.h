// Expert products by definition, in float64: token by token, slot by slot.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/experts/op.h"
#include "ops/glu/reference.h"

namespace tessera::ops::experts::reference {

using Values = std::vector<double>;

struct Forward {
  Values y;        // (T, L)
  Values squares;  // (E): sum of |y|^2 of each expert's own outputs
};

// indices, weights: (T, k); w1, w3: (E, F, L); w2: (E, L, F).
inline Forward forward(const Dims& d, const Values& x, const Values& indices, const Values& weights, const Values& w1,
                       const Values& w3, const Values& w2) {
  const auto L = size_t(d.width), F = size_t(d.hidden), k = size_t(d.top_k);
  Forward out{Values(x.size(), 0.0), Values(size_t(d.experts), 0.0)};
  Values h(F);
  for (size_t t = 0; t < size_t(d.tokens); ++t) {
    for (size_t slot = t * k; slot < (t + 1) * k; ++slot) {
      if (indices[slot] < 0) continue;
      const size_t expert = size_t(indices[slot]), at = expert * F * L;
      for (size_t f = 0; f < F; ++f) {
        double gate = 0, up = 0;
        for (size_t l = 0; l < L; ++l) {
          gate += w1[at + f * L + l] * x[t * L + l];
          up += w3[at + f * L + l] * x[t * L + l];
        }
        h[f] = glu::reference::value(d.activation, gate, up);
      }
      for (size_t l = 0; l < L; ++l) {
        double y = 0;
        for (size_t f = 0; f < F; ++f) y += w2[at + l * F + f] * h[f];
        out.y[t * L + l] += weights[slot] * y;
        out.squares[expert] += y * y;
      }
    }
  }
  return out;
}

}  // namespace tessera::ops::experts::reference
