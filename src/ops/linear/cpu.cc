// Linear on the CPU:   y = x W^T,   dx = dy W,   dW += dy^T x.
#include "ops/linear/cpu.h"

#include "ops/gemm/gemm.h"

namespace tessera::ops::linear::cpu {

void forward(const Dims& d, const Inputs& in, const Outputs& out, Product product, const View& scratch) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    gemm<Real>(product, scratch.data(), Trans::no, Trans::yes, d.tokens, d.out, d.in, 1, in.x.as<Real>(),
               in.x.row_stride(), in.weight.as<Real>(), d.in, 0, out.y.as<Real>(), out.y.row_stride());
  });
}

void backward(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads, Product product,
              const View& scratch) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    const Real* dy = dout.y.as<Real>();
    if (grads.x.present()) {
      gemm<Real>(product, scratch.data(), Trans::no, Trans::no, d.tokens, d.in, d.out, 1, dy, dout.y.row_stride(),
                 in.weight.as<Real>(), d.in, grads.add_to_x ? 1 : 0, grads.x.as<Real>(), grads.x.row_stride());
    }
    if (grads.weight.present()) {
      gemm<Real>(product, scratch.data(), Trans::yes, Trans::no, d.out, d.in, d.tokens, 1, dy, dout.y.row_stride(),
                 in.x.as<Real>(), in.x.row_stride(), 1, grads.weight.as<Real>(), d.in);
    }
  });
}

}  // namespace tessera::ops::linear::cpu
