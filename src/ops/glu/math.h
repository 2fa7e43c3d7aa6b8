// The gated units' scalar functions, value and derivatives, as function objects of the loops that call them (for
// kernels: cuda/math.h).
//
// With s = sigmoid(g), T = tanh(g / b1), U = tanh(v / b2):
//   SwiGLU    h = g s v                dh/dg = (s + g s (1 - s)) v                           dh/dv = g s
//   SiTU-GLU  h = b1 T s * b2 U        dh/dg = ((1 - T^2) s + b1 T s (1 - s)) * b2 U         dh/dv = b1 T s (1 - U^2)
//
// No difference of nearly equal numbers is formed: 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = exp(-2 |x|), and 1 - s is
// sigmoid(-g). Infinite pre-activations give the limits; NaN stays NaN. Everything is branch-free, for vector loops.
#pragma once

#include <limits>

#include "core/fast_math.h"
#include "ops/glu/op.h"

namespace tessera::ops::glu {

template <class Real>
struct Derivatives {
  Real h, gate, up;  // h, dh/dg, dh/dv
};

namespace detail {

template <class Real>
struct Sigmoid {
  Real value, complement;  // sigmoid(x), 1 - sigmoid(x)
};

template <class Real>
[[gnu::always_inline]] inline Sigmoid<Real> sigmoid(Real x) {
  const Real e = fast::exp(-std::fabs(x)), near_one = 1 / (1 + e), near_zero = e * near_one;
  return x < 0 ? Sigmoid<Real>{near_zero, near_one} : Sigmoid<Real>{near_one, near_zero};
}

template <class Real>
struct Tanh {
  Real value, slope;  // tanh(x), 1 - tanh(x)^2
};

[[gnu::always_inline]] inline Tanh<float> tanh(float x) {
  const float a = std::fabs(x), z = x * x;
  const float e = fast::exp(-2 * a), inverse = 1 / (1 + e);
  // Odd polynomial where 1 - e would cancel: a Chebyshev interpolant, error below 2^-25 of the result.
  float p = -6.096714160e-3f;
  p = std::fma(p, z, 2.099717899e-2f);
  p = std::fma(p, z, -5.385090958e-2f);
  p = std::fma(p, z, 1.333276974e-1f);
  p = std::fma(p, z, -3.333332894e-1f);
  const float small = std::fma(p * z, a, a), large = (1 - e) * inverse;
  return {std::copysign(a < 0.625f ? small : large, x), 4 * e * inverse * inverse};
}

[[gnu::always_inline]] inline Tanh<double> tanh(double x) {
  const double e = std::exp(-2 * std::fabs(x)), inverse = 1 / (1 + e);
  return {std::tanh(x), 4 * e * inverse * inverse};
}

}  // namespace detail

template <class Real>
struct SwiGlu {
  // The largest finite number in place of infinity: its product with the sigmoid's exact 0 is 0, not NaN.
  [[gnu::always_inline]] static Real finite(Real g) {
    constexpr Real kMax = std::numeric_limits<Real>::max();
    g = g < -kMax ? -kMax : g;
    return g > kMax ? kMax : g;
  }
  [[gnu::always_inline]] Real value(Real g, Real v) const { return finite(g) * detail::sigmoid(g).value * v; }
  [[gnu::always_inline]] Derivatives<Real> derivatives(Real g, Real v) const {
    const auto s = detail::sigmoid(g);
    const Real act = finite(g) * s.value;
    return {act * v, (s.value + act * s.complement) * v, act};
  }
};

// kCapped false: the up branch is linear (b2 = 0 in the options), b2 U = v.
template <class Real, bool kCapped>
struct Situ {
  Real gate_cap, up_cap, inverse_gate_cap, inverse_up_cap;  // b1, b2, 1 / b1, 1 / b2

  explicit Situ(const Activation& a)
      : gate_cap(Real(a.gate_cap)),
        up_cap(Real(a.up_cap)),
        inverse_gate_cap(Real(1 / a.gate_cap)),
        inverse_up_cap(kCapped ? Real(1 / a.up_cap) : Real(0)) {}

  // The up branch and its slope.
  [[gnu::always_inline]] detail::Tanh<Real> lift(Real v) const {
    if constexpr (!kCapped) return {v, Real(1)};
    const auto t = detail::tanh(v * inverse_up_cap);
    return {up_cap * t.value, t.slope};
  }
  [[gnu::always_inline]] Real value(Real g, Real v) const {
    const Real act = gate_cap * detail::tanh(g * inverse_gate_cap).value * detail::sigmoid(g).value;
    return act * lift(v).value;
  }
  [[gnu::always_inline]] Derivatives<Real> derivatives(Real g, Real v) const {
    const auto s = detail::sigmoid(g);
    const auto t = detail::tanh(g * inverse_gate_cap), up = lift(v);
    const Real act = gate_cap * t.value * s.value;  // never g * s: infinity times 0
    return {act * up.value, (t.slope * s.value + act * s.complement) * up.value, act * up.slope};
  }
};

// Calls f with the function object of `a`: the one place where the kind becomes a template parameter.
template <class Real, class F>
void dispatch_activation(const Activation& a, F&& f) {
  if (a.kind == Kind::swiglu) return f(SwiGlu<Real>{});
  if (a.up_cap == 0) return f(Situ<Real, false>(a));
  return f(Situ<Real, true>(a));
}

// Rough costs for the ledger: an exponential counts 12 operations, a hyperbolic tangent 20.
inline int64_t value_flops(const Activation& a) { return a.kind == Kind::swiglu ? 18 : 60; }
inline int64_t derivative_flops(const Activation& a) { return a.kind == Kind::swiglu ? 24 : 110; }

inline void check_activation(const Activation& a) {
  TESSERA_CHECK(a.kind == Kind::swiglu || (a.gate_cap > 0 && a.up_cap >= 0),
                "SiTU-GLU needs gate cap > 0 and up cap >= 0 (0: linear), found {} and {}", a.gate_cap, a.up_cap);
}

}  // namespace tessera::ops::glu
