// L2 norm on the CPU. Rows are independent:  y = x r,   dx = r (dy - y <y, dy>).
#include "ops/l2_norm/cpu.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"

namespace tessera::ops::l2_norm::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this a thread costs more than it saves

int64_t grain(const Dims& d) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.width, 1)); }

template <class Real>
void forward_rows(const Dims& d, const Inputs& in, const Outputs& out, Real* rnorm_out) {
  parallel_ranges(d.rows, grain(d), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Real* x = in.x.as<Real>() + row * d.width;
      Real* y = out.y.as<Real>() + row * d.width;
      Real square = 0;
#pragma omp simd reduction(+ : square)
      for (int64_t i = 0; i < d.width; ++i) square += x[i] * x[i];
      const Real rnorm = 1 / std::sqrt(square + Real(kEpsilon));
#pragma omp simd
      for (int64_t i = 0; i < d.width; ++i) y[i] = x[i] * rnorm;
      if (rnorm_out != nullptr) rnorm_out[row] = rnorm;
    }
  });
}

template <class Real>
void backward_rows(const Dims& d, const Outputs& out, const Saved& saved, const OutputGrads& dout, const Grads& grads) {
  parallel_ranges(d.rows, grain(d), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Real* y = out.y.as<Real>() + row * d.width;
      const Real* dy = dout.y.as<Real>() + row * d.width;
      Real* dx = grads.x.as<Real>() + row * d.width;
      const Real rnorm = saved.rnorm.as<Real>()[row];
      Real dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < d.width; ++i) dot += y[i] * dy[i];
#pragma omp simd
      for (int64_t i = 0; i < d.width; ++i) dx[i] = rnorm * (dy[i] - y[i] * dot);
    }
  });
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    forward_rows<Real>(d, in, out, saved == nullptr ? nullptr : saved->rnorm.as<Real>());
  });
}

void backward(const Dims& d, const Outputs& out, const Saved& saved, const OutputGrads& dout, const Grads& grads) {
  dispatch_real(out.y.dtype(), [&](auto real) { backward_rows<decltype(real)>(d, out, saved, dout, grads); });
}

}  // namespace tessera::ops::l2_norm::cpu
