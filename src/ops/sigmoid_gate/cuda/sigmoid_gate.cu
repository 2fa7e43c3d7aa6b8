// Sigmoid gate on the GPU. Forward reads two elements and writes one, backward reads three and writes two; nothing else
// is moved. A thread has 8 neighbouring elements, read before they are written, so that dx may lie over dy.
#include "core/cuda/fast_math.h"
#include "core/cuda/kernel.h"
#include "ops/sigmoid_gate/cuda.h"

namespace tessera::ops::sigmoid_gate::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(const T* x, const T* w, T* y, int64_t elements, bool whole) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8, left = elements - at;
  if (left <= 0) return;
  float a[8], gate[8];
  load8(x + at, left, whole, a);
  load8(w + at, left, whole, gate);
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] *= fast_sigmoid(gate[i]).value;
  store8(y + at, left, whole, a);
}

// dx = dy s,   dw = dy x s (1 - s)
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* x, const T* w, const T* dy, T* dx, T* dw, int64_t elements, bool whole) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8, left = elements - at;
  if (left <= 0) return;
  float a[8], gate[8], g[8];
  load8(x + at, left, whole, a);
  load8(w + at, left, whole, gate);
  load8(dy + at, left, whole, g);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Sigmoid s = fast_sigmoid(gate[i]);
    a[i] *= g[i] * s.value * s.complement;
    g[i] *= s.value;
  }
  store8(dx + at, left, whole, g);
  store8(dw + at, left, whole, a);
}

View flat(const View& v) { return v.reshaped({1, v.elements()}); }

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out) {
  const int64_t n = d.rows * d.width;
  const bool whole = eights(flat(in.x), flat(in.w), flat(out.y));
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    launch(forward_kernel<T>, ceil_div(n, kThreads * 8), kThreads, 0, stream)(in.x.gpu<T>(), in.w.gpu<T>(),
                                                                              out.y.gpu<T>(), n, whole);
  });
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const int64_t n = d.rows * d.width;
  const bool whole = eights(flat(in.x), flat(in.w), flat(dout.y), flat(grads.x), flat(grads.w));
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    launch(backward_kernel<T>, ceil_div(n, kThreads * 8), kThreads, 0, stream)(
        in.x.gpu<T>(), in.w.gpu<T>(), dout.y.gpu<T>(), grads.x.gpu<T>(), grads.w.gpu<T>(), n, whole);
  });
}

}  // namespace tessera::ops::sigmoid_gate::cuda
