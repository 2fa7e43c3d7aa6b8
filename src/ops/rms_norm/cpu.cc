// RMSNorm on the CPU. Rows are independent; with a = weight o dy,
//   dx = rstd (a - x rstd^2 <a, x> / W),   dweight = sum over rows of dy o x rstd.
#include "ops/rms_norm/cpu.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"

namespace tessera::ops::rms_norm::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this a thread costs more than it saves

int64_t grain(const Dims& d) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.width, 1)); }

template <class Real>
void forward_rows(const Dims& d, const Inputs& in, const Outputs& out, Real* rstd_out) {
  const Real* weight = in.weight.as<Real>();
  parallel_ranges(d.rows, grain(d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Real* x = in.x.as<Real>() + r * in.x.row_stride();
      Real* y = out.y.as<Real>() + r * out.y.row_stride();
      Real square = 0;
#pragma omp simd reduction(+ : square)
      for (int64_t i = 0; i < d.width; ++i) square += x[i] * x[i];
      const Real rstd = 1 / std::sqrt(square / Real(d.width) + Real(d.eps));
#pragma omp simd
      for (int64_t i = 0; i < d.width; ++i) y[i] = x[i] * rstd * weight[i];
      if (rstd_out != nullptr) rstd_out[r] = rstd;
    }
  });
}

template <class Real>
void backward_rows(const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout, const Grads& grads,
                   Real* partials) {
  const Real* weight = in.weight.as<Real>();
  parallel_items(kPartials, [&](int64_t p) {
    Real* dweight = partials + p * d.width;
    std::fill_n(dweight, d.width, Real(0));
    for (int64_t r = d.rows * p / kPartials; r < d.rows * (p + 1) / kPartials; ++r) {
      const Real* x = in.x.as<Real>() + r * in.x.row_stride();
      const Real* dy = dout.y.as<Real>() + r * dout.y.row_stride();
      Real* dx = grads.x.as<Real>() + r * grads.x.row_stride();
      const Real rstd = saved.rstd.as<Real>()[r];
      Real dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < d.width; ++i) dot += weight[i] * dy[i] * x[i];
      const Real pull = rstd * rstd * dot / Real(d.width);
#pragma omp simd
      for (int64_t i = 0; i < d.width; ++i) {
        const Real dy_i = dy[i];  // dx may be dy's own memory
        dweight[i] += dy_i * x[i] * rstd;
        dx[i] = rstd * (weight[i] * dy_i - x[i] * pull);
      }
    }
  });
  Real* dweight = grads.weight.as<Real>();
  for (int64_t p = 0; p < kPartials; ++p) {
    for (int64_t i = 0; i < d.width; ++i) dweight[i] += partials[p * d.width + i];
  }
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    forward_rows<Real>(d, in, out, saved == nullptr ? nullptr : saved->rstd.as<Real>());
  });
}

void backward(const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout, const Grads& grads,
              const View& partials) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    backward_rows<Real>(d, in, saved, dout, grads, partials.as<Real>());
  });
}

}  // namespace tessera::ops::rms_norm::cpu
