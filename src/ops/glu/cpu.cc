// Gated units on the CPU: element by element, rows over the threads.
#include "ops/glu/cpu.h"

#include <algorithm>

#include "core/parallel.h"
#include "ops/glu/math.h"

namespace tessera::ops::glu::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 13;  // below this a thread costs more than it saves

// Calls f(row) for all rows.
template <class F>
void for_rows(const Dims& d, F&& f) {
  parallel_ranges(d.rows, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.width, 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t r = begin; r < end; ++r) f(r);
                  });
}

template <class Real>
Real* row(const View& view, int64_t r) {
  return view.as<Real>() + r * view.row_stride();
}

// Both dispatches in one: f(Real{}, activation).
template <class F>
void dispatch(DType dtype, const Activation& activation, F&& f) {
  dispatch_real(dtype,
                [&](auto real) { dispatch_activation<decltype(real)>(activation, [&](auto act) { f(real, act); }); });
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out) {
  dispatch(in.gate.dtype(), d.activation, [&](auto real, auto act) {
    using Real = decltype(real);
    for_rows(d, [&, act](int64_t r) {
      const Real *g = row<Real>(in.gate, r), *v = row<Real>(in.up, r);
      Real* h = row<Real>(out.h, r);
#pragma omp simd
      for (int64_t i = 0; i < d.width; ++i) h[i] = act.value(g[i], v[i]);
    });
  });
}

void backward(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  dispatch(in.gate.dtype(), d.activation, [&](auto real, auto act) {
    using Real = decltype(real);
    for_rows(d, [&, act](int64_t r) {
      const Real *g = row<Real>(in.gate, r), *v = row<Real>(in.up, r), *dh = row<Real>(dout.h, r);
      Real *dg = row<Real>(grads.gate, r), *dv = row<Real>(grads.up, r);
#pragma omp simd
      for (int64_t i = 0; i < d.width; ++i) {
        const auto slope = act.derivatives(g[i], v[i]);
        const Real dh_i = dh[i];
        dg[i] = dh_i * slope.gate;
        dv[i] = dh_i * slope.up;
      }
    });
  });
}

}  // namespace tessera::ops::glu::cpu
