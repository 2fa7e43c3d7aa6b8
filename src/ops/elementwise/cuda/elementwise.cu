// Sums on the GPU, in float32 and rounded once. Three elements of traffic an element is the floor, and all there is: a
// thread has 8 neighbouring elements, read before they are written, so that y may be an operand.
#include "core/cuda/kernel.h"
#include "ops/elementwise/cuda.h"

namespace tessera::ops::elementwise::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) add_kernel(const T* a, const T* b, T* y, int64_t elements, bool whole) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8, left = elements - i;
  if (left <= 0) return;
  float x[8], z[8];
  load8(a + i, left, whole, x);
  load8(b + i, left, whole, z);
#pragma unroll
  for (int k = 0; k < 8; ++k) x[k] += z[k];
  store8(y + i, left, whole, x);
}

// One block a part, in float64.
__global__ void __launch_bounds__(kThreads) square_sums_kernel(const float* x, int64_t length, double* sums) {
  __shared__ double shared[kThreads / 32];
  const float* part = x + int64_t(blockIdx.x) * length;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < length; i += kThreads) sum += double(part[i]) * double(part[i]);
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

}  // namespace

void square_sums(GpuStream stream, const View& x, const View& sums) {
  const int64_t parts = sums.elements(), length = parts > 0 ? x.elements() / parts : 0;
  launch(square_sums_kernel, parts, kThreads, 0, stream)(x.gpu<float>(), length, sums.gpu<double>());
}

void add(GpuStream stream, const View& a, const View& b, const View& y) {
  const int64_t n = a.elements();
  const Shape flat{1, n};
  const bool whole = eights(a.reshaped(flat), b.reshaped(flat), y.reshaped(flat));
  dispatch(a.dtype(), [&](auto element) {
    using T = decltype(element);
    launch(add_kernel<T>, ceil_div(n, kThreads * 8), kThreads, 0, stream)(a.gpu<T>(), b.gpu<T>(), y.gpu<T>(), n, whole);
  });
}

}  // namespace tessera::ops::elementwise::cuda
