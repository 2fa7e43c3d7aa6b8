// The gated units' scalar functions on the GPU: the formulas of ops/glu/math.h, where they are explained, in float32
// with the GPU's special functions. Function objects, to be passed to a kernel by value.
#pragma once

#include <cfloat>

#include "core/cuda/fast_math.h"
#include "ops/glu/op.h"

namespace tessera::ops::glu::cuda {

struct Derivatives {
  float h, gate, up;  // h, dh/dg, dh/dv
};

struct Tanh {
  float value, slope;  // tanh(x), 1 - tanh(x)^2
};

__device__ inline Tanh fast_tanh(float x) {
  const float a = fabsf(x), z = x * x;
  const float e = tessera::cuda::fast_exp(-2.0f * a), inverse = tessera::cuda::fast_reciprocal(1.0f + e);
  float p = -6.096714160e-3f;  // where 1 - e would cancel; the polynomial of core/fast_math.h
  p = fmaf(p, z, 2.099717899e-2f);
  p = fmaf(p, z, -5.385090958e-2f);
  p = fmaf(p, z, 1.333276974e-1f);
  p = fmaf(p, z, -3.333332894e-1f);
  const float small = fmaf(p * z, a, a), large = (1.0f - e) * inverse;
  return {copysignf(a < 0.625f ? small : large, x), 4.0f * e * inverse * inverse};
}

struct SwiGlu {
  // The largest finite number in place of infinity: its product with the sigmoid's exact 0 is 0, not NaN.
  __device__ static float finite(float g) { return fminf(fmaxf(g, -FLT_MAX), FLT_MAX); }
  __device__ float value(float g, float v) const { return finite(g) * tessera::cuda::fast_sigmoid(g).value * v; }
  __device__ Derivatives derivatives(float g, float v) const {
    const auto s = tessera::cuda::fast_sigmoid(g);
    const float act = finite(g) * s.value;
    return {act * v, (s.value + act * s.complement) * v, act};
  }
};

// kCapped false: the up branch is linear.
template <bool kCapped>
struct Situ {
  float gate_cap, up_cap, inverse_gate_cap, inverse_up_cap;

  explicit Situ(const Activation& a)
      : gate_cap(float(a.gate_cap)),
        up_cap(float(a.up_cap)),
        inverse_gate_cap(float(1 / a.gate_cap)),
        inverse_up_cap(kCapped ? float(1 / a.up_cap) : 0.0f) {}

  __device__ Tanh lift(float v) const {
    if constexpr (kCapped) {
      const Tanh t = fast_tanh(v * inverse_up_cap);
      return {up_cap * t.value, t.slope};
    } else {
      return {v, 1.0f};
    }
  }
  __device__ float value(float g, float v) const {
    const float act = gate_cap * fast_tanh(g * inverse_gate_cap).value * tessera::cuda::fast_sigmoid(g).value;
    return act * lift(v).value;
  }
  __device__ Derivatives derivatives(float g, float v) const {
    const auto s = tessera::cuda::fast_sigmoid(g);
    const Tanh t = fast_tanh(g * inverse_gate_cap), up = lift(v);
    const float act = gate_cap * t.value * s.value;  // never g * s: infinity times 0
    return {act * up.value, (t.slope * s.value + act * s.complement) * up.value, act * up.slope};
  }
};

// Calls f with the function object of `a`.
template <class F>
void dispatch_activation(const Activation& a, F&& f) {
  if (a.kind == Kind::swiglu) return f(SwiGlu{});
  if (a.up_cap == 0) return f(Situ<false>(a));
  f(Situ<true>(a));
}

}  // namespace tessera::ops::glu::cuda
