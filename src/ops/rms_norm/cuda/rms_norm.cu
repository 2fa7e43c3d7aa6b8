// RMSNorm on the GPU. One pass: a row is read once, lies in the registers of its group of threads, and is written once.
//
// A group is a warp for rows up to 512 elements (per-head norms: many short rows) and a block of 256 threads above.
// Each thread owns N pieces of 8 neighbouring elements. In the backward a block walks its share of the rows and keeps
// its sum of dy o x rstd in registers; the kPartials sums are added in order by a second kernel, so the bits never
// vary.
#include "core/cuda/kernel.h"
#include "ops/rms_norm/cuda.h"

namespace tessera::ops::rms_norm::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256;

template <class T>
struct Arguments {
  int64_t rows, width;
  float eps;
  bool whole;  // rows can be read eight elements at a time
  const T* x = nullptr;
  int64_t x_stride = 0;
  const float* weight = nullptr;
  float* rstd = nullptr;  // forward: null where it is not kept
  T* y = nullptr;         // forward
  int64_t y_stride = 0;
  const T* dy = nullptr;  // backward, from here on
  int64_t dy_stride = 0;
  T* dx = nullptr;
  int64_t dx_stride = 0;
  float* partials = nullptr;
};

template <int G>
__device__ float group_sum(float x, float* shared) {
  return G == 32 ? warp_sum(x) : block_sum(x, shared);
}

template <class T, int G, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments<T> a) {
  __shared__ float shared[kThreads / 32];
  const int lane = threadIdx.x % G;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / G) + threadIdx.x / G;
  if (row >= a.rows) return;  // whole groups: no barrier is left waiting
  float x[N][8], square = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = (n * G + lane) * 8;
    load8(a.x + row * a.x_stride + c, a.width - c, a.whole, x[n]);
#pragma unroll
    for (int i = 0; i < 8; ++i) square += x[n][i] * x[n][i];
  }
  const float rstd = rsqrtf(group_sum<G>(square, shared) / float(a.width) + a.eps);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = (n * G + lane) * 8;
    float w[8];
    load8(a.weight + c, a.width - c, a.whole, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[n][i] *= rstd * w[i];
    store8(a.y + row * a.y_stride + c, a.width - c, a.whole, x[n]);
  }
  if (a.rstd != nullptr && lane == 0) a.rstd[row] = rstd;
}

// dx = rstd (w o dy - x rstd^2 <w o dy, x> / W)
template <class T, int G, int N>
__global__ void __launch_bounds__(kThreads) backward_kernel(Arguments<T> a) {
  constexpr int kGroups = kThreads / G;
  __shared__ float shared[kThreads / 32];
  extern __shared__ float of_groups[];  // (kGroups, W)
  const int lane = threadIdx.x % G, group = threadIdx.x / G;
  float w[N][8], dweight[N][8] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = (n * G + lane) * 8;
    load8(a.weight + c, a.width - c, a.whole, w[n]);
  }
  const int64_t begin = a.rows * blockIdx.x / gridDim.x, end = a.rows * (blockIdx.x + 1) / gridDim.x;
  for (int64_t row = begin + group; row < end; row += kGroups) {
    float x[N][8], dy[N][8], dot = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int64_t c = (n * G + lane) * 8;
      load8(a.x + row * a.x_stride + c, a.width - c, a.whole, x[n]);
      load8(a.dy + row * a.dy_stride + c, a.width - c, a.whole, dy[n]);
#pragma unroll
      for (int i = 0; i < 8; ++i) dot += w[n][i] * dy[n][i] * x[n][i];
    }
    const float rstd = a.rstd[row], pull = rstd * rstd * group_sum<G>(dot, shared) / float(a.width);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int64_t c = (n * G + lane) * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dweight[n][i] += dy[n][i] * x[n][i] * rstd;
        x[n][i] = rstd * (w[n][i] * dy[n][i] - x[n][i] * pull);
      }
      store8(a.dx + row * a.dx_stride + c, a.width - c, a.whole, x[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = (n * G + lane) * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (c + i < a.width) of_groups[group * a.width + c + i] = dweight[n][i];
    }
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < a.width; c += kThreads) {
    float sum = 0;
    for (int g = 0; g < kGroups; ++g) sum += of_groups[g * a.width + c];
    a.partials[blockIdx.x * a.width + c] = sum;
  }
}

__global__ void add_partials(const float* partials, int64_t count, int64_t width, float* dweight) {
  const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= width) return;
  float sum = 0;
  for (int64_t p = 0; p < count; ++p) sum += partials[p * width + c];
  dweight[c] += sum;
}

// Calls f<G, N>(): the smallest group and number of pieces that hold a row.
template <class F>
void choose(int64_t width, F&& f) {
  TESSERA_CHECK(width <= kMaxWidth, "rms_norm of rows of {} elements on the GPU; at most {}", width, kMaxWidth);
  if (width <= 256) return f.template operator()<32, 1>();
  if (width <= 512) return f.template operator()<32, 2>();
  if (width <= 2048) return f.template operator()<256, 1>();
  if (width <= 4096) return f.template operator()<256, 2>();
  f.template operator()<256, 4>();
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a{.rows = d.rows, .width = d.width, .eps = float(d.eps), .whole = eights(in.x, in.weight, out.y)};
    a.x = in.x.gpu<T>(), a.x_stride = in.x.row_stride();
    a.weight = in.weight.gpu<float>();
    a.y = out.y.gpu<T>(), a.y_stride = out.y.row_stride();
    a.rstd = saved != nullptr ? saved->rstd.gpu<float>() : nullptr;
    choose(d.width, [&]<int G, int N>() {
      launch(forward_kernel<T, G, N>, ceil_div(d.rows, kThreads / G), kThreads, 0, stream)(a);
    });
  });
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads, const View& partials) {
  if (d.rows == 0) return;
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a{
        .rows = d.rows, .width = d.width, .eps = float(d.eps), .whole = eights(in.x, in.weight, dout.y, grads.x)};
    a.x = in.x.gpu<T>(), a.x_stride = in.x.row_stride();
    a.weight = in.weight.gpu<float>();
    a.rstd = saved.rstd.gpu<float>();
    a.dy = dout.y.gpu<T>(), a.dy_stride = dout.y.row_stride();
    a.dx = grads.x.gpu<T>(), a.dx_stride = grads.x.row_stride();
    a.partials = partials.gpu<float>();
    choose(d.width, [&]<int G, int N>() {
      launch(backward_kernel<T, G, N>, kPartials, kThreads, kThreads / G * d.width * 4, stream)(a);
    });
    launch(add_partials, ceil_div(d.width, kThreads), kThreads, 0, stream)(a.partials, kPartials, d.width,
                                                                           grads.weight.gpu<float>());
  });
}

}  // namespace tessera::ops::rms_norm::cuda
