// Sigmoid gate on the CPU, elementwise. With s = sigmoid(w):   dx = dy s,   dw = dy x s (1 - s).
#include "ops/sigmoid_gate/cpu.h"

#include <cmath>

#include "core/fast_math.h"
#include "core/parallel.h"

namespace tessera::ops::sigmoid_gate::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this a thread costs more than it saves

template <class Real>
void forward_range(const Real* x, const Real* w, Real* y, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) y[i] = x[i] * fast::sigmoid(w[i]);
}

template <class Real>
void backward_range(const Real* x, const Real* w, const Real* dy, Real* dx, Real* dw, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    // s and 1 - s are e / (1 + e) and 1 / (1 + e), e = exp(-|w|): neither tail cancels.
    const Real e = fast::exp(-std::fabs(w[i]));
    const Real large = 1 / (1 + e), small = e * large;
    const Real dy_i = dy[i];  // dx may be dy's own memory
    dw[i] = dy_i * x[i] * large * small;
    dx[i] = dy_i * (w[i] < 0 ? small : large);
  }
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    parallel_ranges(d.rows * d.width, kGrainElements, [&](int64_t begin, int64_t end) {
      forward_range(in.x.as<Real>(), in.w.as<Real>(), out.y.as<Real>(), begin, end);
    });
  });
}

void backward(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    parallel_ranges(d.rows * d.width, kGrainElements, [&](int64_t begin, int64_t end) {
      backward_range(in.x.as<Real>(), in.w.as<Real>(), dout.y.as<Real>(), grads.x.as<Real>(), grads.w.as<Real>(), begin,
                     end);
    });
  });
}

}  // namespace tessera::ops::sigmoid_gate::cpu
