// The decay gate and its derivatives, for inner loops. x = z + dt_bias, a = exp(A_log) of the value head.
//
//   unbounded   g = -a softplus(x)          dg/dx = -a sigmoid(x)                          dg/dA_log = g
//   bounded     g = l sigmoid(u), u = a x   dg/dx = a l sigmoid(u) (1 - sigmoid(u))        dg/dA_log = u dg/du
//
// sigmoid (1 - sigmoid) is e / (1 + e)^2 with e = exp(-|u|): no cancellation where the sigmoid saturates, and exactly 0
// where it has: then both derivatives are 0, since a and u are finite.
#pragma once

#include <cmath>
#include <limits>

#include "core/fast_math.h"
#include "ops/kda/op.h"

namespace tessera::ops::kda::cpu {

// exp(A_log), at most the root of the largest number: a x stays finite, and 0 times it is 0.
template <class Real>
Real gate_rate(const Real* a_log, int64_t value_head) {
  if (a_log == nullptr) return 1;
  return std::min(std::exp(a_log[value_head]), std::sqrt(std::numeric_limits<Real>::max()));
}

template <class Real>
struct GateValue {
  Real g, by_x, by_a_log;
};

template <Gate kGate, class Real>
[[gnu::always_inline]] inline GateValue<Real> gate(Real x, Real a, Real lower_bound) {
  if constexpr (kGate == Gate::unbounded) {
    const Real g = -a * fast::softplus(x);
    return {g, -a * fast::sigmoid(x), g};
  } else {
    const Real u = a * x;
    const Real e = fast::exp(-std::fabs(u));
    const Real d = 1 / (1 + e);
    const Real slope = lower_bound * e * d * d;
    return {lower_bound * (u < 0 ? e * d : d), a * slope, slope * u};
  }
}

// beta = sigmoid(logit), doubled when negative eigenvalues are allowed; its derivative is beta (1 - beta / bound).
template <class Real>
Real beta_of(Real logit, bool negative_eigenvalues) {
  return (negative_eigenvalues ? Real(2) : Real(1)) * fast::sigmoid(logit);
}

}  // namespace tessera::ops::kda::cpu
