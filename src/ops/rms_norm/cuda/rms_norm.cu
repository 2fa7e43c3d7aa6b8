// RMSNorm on the GPU. One pass: a row is read once, lies in the registers of its group of threads, and is written once.
//
// A group is half a warp for rows up to 128 elements (per-head norms: many short rows), a warp up to 2048, so that no
// row waits at a barrier, and a block of 256 threads above. Each thread owns N pieces of 8 neighbouring elements of U
// rows at a time: enough bytes on their way to keep the memory busy. In the backward a block walks its share of the
// rows and keeps its sum of dy o x rstd in registers; the kPartials sums are added in order by a second kernel, so the
// bits never vary.
#include "core/cuda/kernel.h"
#include "core/cuda/partials.h"
#include "core/cuda/piece.h"
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

// All threads of a block come here together: a warp may hold two groups.
template <int G>
__device__ float group_sum(float x, float* shared) {
  if constexpr (G > 32) {
    return block_sum(x, shared);
  } else {
#pragma unroll
    for (int offset = G / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }
}

// Element of piece n of this thread.
template <int G>
__device__ int64_t column(int n) {
  return (n * G + int64_t(threadIdx.x) % G) * 8;
}
// The thread's elements of a row; zeros where the row is not there.
template <class T, int G, int N>
__device__ void load_row(const T* row, int64_t width, bool whole, bool present, float (&x)[N][8]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = column<G>(n);
    load8(row + c, present ? width - c : 0, whole, x[n]);
  }
}

template <class T, int G, int N, int U>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments<T> a) {
  constexpr int kGroups = kThreads / G;
  __shared__ float shared[kThreads / 32];
  const int64_t first = int64_t(blockIdx.x) * kGroups * U + threadIdx.x / G;
  float x[U][N][8];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t row = first + u * kGroups;
    load_row<T, G>(a.x + row * a.x_stride, a.width, a.whole, row < a.rows, x[u]);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int64_t row = first + u * kGroups;
    float square = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) square += x[u][n][i] * x[u][n][i];
    }
    const float rstd = rsqrtf(group_sum<G>(square, shared) / float(a.width) + a.eps);
    if (row >= a.rows) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int64_t c = column<G>(n);
      float w[8];
      load8(a.weight + c, a.width - c, a.whole, w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[u][n][i] *= rstd * w[i];
      store8(a.y + row * a.y_stride + c, a.width - c, a.whole, x[u][n]);
    }
    if (a.rstd != nullptr && threadIdx.x % G == 0) a.rstd[row] = rstd;
  }
}

// dx = rstd (w o dy - x rstd^2 <w o dy, x> / W)
template <class T, int G, int N, int U>
__global__ void __launch_bounds__(kThreads, U* N < 6 ? 2 : 1) backward_kernel(Arguments<T> a) {
  constexpr int kGroups = kThreads / G;
  __shared__ float shared[kThreads / 32];
  extern __shared__ float of_groups[];  // (kGroups, W)
  const int group = threadIdx.x / G;
  float dweight[N][8] = {};
  const int64_t begin = a.rows * blockIdx.x / gridDim.x, end = a.rows * (blockIdx.x + 1) / gridDim.x;
  for (int64_t first = begin + group; first - group < end; first += kGroups * U) {
    Piece<T> x[U][N], dy[U][N];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = first + u * kGroups;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int64_t c = column<G>(n), left = row < end ? a.width - c : 0;
        x[u][n] = load_piece(a.x + row * a.x_stride + c, left, a.whole);
        dy[u][n] = load_piece(a.dy + row * a.dy_stride + c, left, a.whole);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int64_t row = first + u * kGroups;
      const float rstd = row < end ? a.rstd[row] : 0.0f;
      float dot = 0, of_x[8], of_dy[8], w[8];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int64_t c = column<G>(n);
        load8(a.weight + c, a.width - c, a.whole, w);
        x[u][n].convert(of_x), dy[u][n].convert(of_dy);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float product = of_dy[i] * of_x[i];
          dweight[n][i] += product * rstd;
          dot += product * w[i];
        }
      }
      const float pull = rstd * rstd * group_sum<G>(dot, shared) / float(a.width);
      if (row >= end) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int64_t c = column<G>(n);
        load8(a.weight + c, a.width - c, a.whole, w);  // from the nearest cache: registers are dearer
        x[u][n].convert(of_x), dy[u][n].convert(of_dy);
#pragma unroll
        for (int i = 0; i < 8; ++i) of_x[i] = rstd * (of_dy[i] * w[i] - of_x[i] * pull);
        store8(a.dx + row * a.dx_stride + c, a.width - c, a.whole, of_x);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = column<G>(n);
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

__global__ void __launch_bounds__(kPartialThreads)
    add_partials(const float* partials, int64_t count, int64_t width, float* dweight) {
  const float sum = sum_partials(partials, count, width);
  const int64_t c = partial_column();
  if (c < width) dweight[c] += sum;
}

// Calls f<G, N, U>(): the smallest group and number of pieces that hold a row, and rows of a group at a time.
template <class F>
void choose(int64_t width, F&& f) {
  TESSERA_CHECK(width <= kMaxWidth, "rms_norm of rows of {} elements on the GPU; at most {}", width, kMaxWidth);
  if (width <= 128) return f.template operator()<16, 1, 4>();
  if (width <= 256) return f.template operator()<32, 1, 4>();
  if (width <= 512) return f.template operator()<32, 2, 2>();
  if (width <= 768) return f.template operator()<32, 3, 1>();
  if (width <= 1280) return f.template operator()<32, 5, 1>();
  if (width <= 2048) return f.template operator()<32, 8, 1>();
  if (width <= 4096) return f.template operator()<256, 2, 1>();
  f.template operator()<256, 4, 1>();
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
    choose(d.width, [&]<int G, int N, int U>() {
      launch(forward_kernel<T, G, N, U>, ceil_div(d.rows, kThreads / G * U), kThreads, 0, stream)(a);
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
    choose(d.width, [&]<int G, int N, int U>() {
      launch(backward_kernel<T, G, N, U>, kPartials, kThreads, kThreads / G * d.width * 4, stream)(a);
    });
    launch(add_partials, partial_blocks(d.width), kPartialThreads, 0, stream)(a.partials, kPartials, d.width,
                                                                              grads.weight.gpu<float>());
  });
}

}  // namespace tessera::ops::rms_norm::cuda
