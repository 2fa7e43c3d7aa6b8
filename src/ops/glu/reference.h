// Gated units by definition, in float64.
#pragma once

#include <cmath>
#include <vector>

#include "ops/glu/op.h"

namespace tessera::ops::glu::reference {

inline double value(const Activation& a, double g, double v) {
  const double s = 1 / (1 + std::exp(-g));
  if (a.kind == Kind::swiglu) return g * s * v;
  return a.gate_cap * std::tanh(g / a.gate_cap) * s * (a.up_cap == 0 ? v : a.up_cap * std::tanh(v / a.up_cap));
}

inline std::vector<double> forward(const Activation& a, const std::vector<double>& gate,
                                   const std::vector<double>& up) {
  std::vector<double> h(gate.size());
  for (size_t i = 0; i < h.size(); ++i) h[i] = value(a, gate[i], up[i]);
  return h;
}

}  // namespace tessera::ops::glu::reference
