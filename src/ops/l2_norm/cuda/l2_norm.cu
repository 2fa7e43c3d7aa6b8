// L2 norm on the GPU. Forward moves 2 elements an element, backward 3, and 4 bytes a row: a row is read once into the
// registers of its group of G lanes and written once, in place if wanted.
//
// Rows are heads, 128 elements as a rule: a half-warp of 8 elements a lane. Lanes behind the last row stay to take part
// in the warp's sums, on zeros.
#include "core/cuda/kernel.h"
#include "ops/l2_norm/cuda.h"

namespace tessera::ops::l2_norm::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256;

template <class T>
struct Arguments {
  int64_t rows, width;
  bool whole;               // rows can be read eight elements at a time
  const T* from = nullptr;  // x of the forward, y of the backward
  const T* dy = nullptr;
  T* to = nullptr;         // y, or dx
  float* rnorm = nullptr;  // forward: null where it is not kept
};

// A lane's place: its row, and where in the row its N pieces of 8 elements begin.
template <int G>
struct Place {
  int lane = threadIdx.x % G;
  int64_t row = int64_t(blockIdx.x) * (kThreads / G) + threadIdx.x / G;

  __device__ int64_t column(int n) const { return (n * G + lane) * 8; }
};

template <int G>
__device__ float group_sum(float x) {
#pragma unroll
  for (int offset = G / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

template <class T, int G, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments<T> a) {
  const Place<G> p;
  const bool live = p.row < a.rows;
  float x[N][8] = {}, square = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (live) load8(a.from + p.row * a.width + p.column(n), a.width - p.column(n), a.whole, x[n]);
#pragma unroll
    for (int i = 0; i < 8; ++i) square += x[n][i] * x[n][i];
  }
  const float rnorm = rsqrtf(group_sum<G>(square) + float(kEpsilon));
  if (!live) return;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[n][i] *= rnorm;
    store8(a.to + p.row * a.width + p.column(n), a.width - p.column(n), a.whole, x[n]);
  }
  if (a.rnorm != nullptr && p.lane == 0) a.rnorm[p.row] = rnorm;
}

// dx = r (dy - y <y, dy>)
template <class T, int G, int N>
__global__ void __launch_bounds__(kThreads) backward_kernel(Arguments<T> a) {
  const Place<G> p;
  const bool live = p.row < a.rows;
  float y[N][8] = {}, dy[N][8] = {}, dot = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (live) {
      load8(a.from + p.row * a.width + p.column(n), a.width - p.column(n), a.whole, y[n]);
      load8(a.dy + p.row * a.width + p.column(n), a.width - p.column(n), a.whole, dy[n]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) dot += y[n][i] * dy[n][i];
  }
  dot = group_sum<G>(dot);
  if (!live) return;
  const float rnorm = a.rnorm[p.row];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) dy[n][i] = rnorm * (dy[n][i] - y[n][i] * dot);
    store8(a.to + p.row * a.width + p.column(n), a.width - p.column(n), a.whole, dy[n]);
  }
}

// Calls f<G, N>(): the smallest group and number of pieces that hold a row.
template <class F>
void choose(int64_t width, F&& f) {
  TESSERA_CHECK(width <= kMaxWidth, "l2_norm of rows of {} elements on the GPU; at most {}", width, kMaxWidth);
  if (width <= 128) return f.template operator()<16, 1>();
  if (width <= 256) return f.template operator()<32, 1>();
  f.template operator()<32, 4>();
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a{.rows = d.rows, .width = d.width, .whole = eights(in.x, out.y)};
    a.from = in.x.gpu<T>();
    a.to = out.y.gpu<T>();
    a.rnorm = saved != nullptr ? saved->rnorm.gpu<float>() : nullptr;
    choose(d.width, [&]<int G, int N>() {
      launch(forward_kernel<T, G, N>, ceil_div(d.rows, kThreads / G), kThreads, 0, stream)(a);
    });
  });
}

void backward(GpuStream stream, const Dims& d, const Outputs& out, const Saved& saved, const OutputGrads& dout,
              const Grads& grads) {
  dispatch(out.y.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a{.rows = d.rows, .width = d.width, .whole = eights(out.y, dout.y, grads.x)};
    a.from = out.y.gpu<T>();
    a.dy = dout.y.gpu<T>();
    a.to = grads.x.gpu<T>();
    a.rnorm = saved.rnorm.gpu<float>();
    choose(d.width, [&]<int G, int N>() {
      launch(backward_kernel<T, G, N>, ceil_div(d.rows, kThreads / G), kThreads, 0, stream)(a);
    });
  });
}

}  // namespace tessera::ops::l2_norm::cuda
