// Gated units on the GPU. Forward reads gate and up and writes h, 3 elements of traffic; backward reads three and
// writes two, 5. A thread has 8 neighbouring elements of a row, all of whose inputs it reads before it writes: that
// makes the gradients over inputs or dh safe. SiTU has three exponentials and as many reciprocals an element, near the
// rate at which the special-function units match the memory; so they are the one-instruction forms of
// core/cuda/fast_math.h.
#include "core/cuda/kernel.h"
#include "ops/glu/cuda.h"
#include "ops/glu/cuda/math.h"

namespace tessera::ops::glu::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256;

template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;

  __device__ T* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};
template <class T>
Rows<T> rows(const View& v) {
  return {v.gpu<T>(), v.row_stride()};
}

template <class T>
struct Arguments {
  int64_t rows, width, pieces;  // pieces of 8 elements in a row
  bool whole;                   // rows can be read eight elements at a time
  Rows<T> gate, up;
  Rows<T> h = {};                         // forward
  Rows<T> dh = {}, dgate = {}, dup = {};  // backward
};

// The thread's piece of 8 elements; `left` elements of the row from its first on, 0 behind the last piece.
struct Piece {
  int64_t row, column, left;
};
template <class T>
__device__ Piece piece_of_thread(const Arguments<T>& a) {
  const uint64_t i = uint64_t(blockIdx.x) * kThreads + threadIdx.x, per_row = uint64_t(a.pieces);
  const int64_t row = int64_t(i / per_row), column = int64_t(i % per_row) * 8;
  return {row, column, row < a.rows ? a.width - column : 0};
}

template <class T, class Act>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments<T> a, Act act) {
  const Piece p = piece_of_thread(a);
  if (p.left <= 0) return;
  float g[8], v[8];
  load8(a.gate.at(p.row, p.column), p.left, a.whole, g);
  load8(a.up.at(p.row, p.column), p.left, a.whole, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) g[i] = act.value(g[i], v[i]);
  store8(a.h.at(p.row, p.column), p.left, a.whole, g);
}

template <class T, class Act>
__global__ void __launch_bounds__(kThreads) backward_kernel(Arguments<T> a, Act act) {
  const Piece p = piece_of_thread(a);
  if (p.left <= 0) return;
  float g[8], v[8], dh[8];
  load8(a.gate.at(p.row, p.column), p.left, a.whole, g);
  load8(a.up.at(p.row, p.column), p.left, a.whole, v);
  load8(a.dh.at(p.row, p.column), p.left, a.whole, dh);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Derivatives slope = act.derivatives(g[i], v[i]);
    g[i] = dh[i] * slope.gate;
    v[i] = dh[i] * slope.up;
  }
  store8(a.dgate.at(p.row, p.column), p.left, a.whole, g);
  store8(a.dup.at(p.row, p.column), p.left, a.whole, v);
}

template <class T>
int64_t blocks(const Arguments<T>& a) {
  return ceil_div(a.rows * a.pieces, kThreads);
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out) {
  dispatch(in.gate.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a{.rows = d.rows,
                   .width = d.width,
                   .pieces = ceil_div(d.width, 8),
                   .whole = eights(in.gate, in.up, out.h),
                   .gate = rows<T>(in.gate),
                   .up = rows<T>(in.up)};
    a.h = rows<T>(out.h);
    dispatch_activation(d.activation, [&](auto act) {
      launch(forward_kernel<T, decltype(act)>, blocks(a), kThreads, 0, stream)(a, act);
    });
  });
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  dispatch(in.gate.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a{.rows = d.rows,
                   .width = d.width,
                   .pieces = ceil_div(d.width, 8),
                   .whole = eights(in.gate, in.up, dout.h, grads.gate, grads.up),
                   .gate = rows<T>(in.gate),
                   .up = rows<T>(in.up)};
    a.dh = rows<T>(dout.h), a.dgate = rows<T>(grads.gate), a.dup = rows<T>(grads.up);
    dispatch_activation(d.activation, [&](auto act) {
      launch(backward_kernel<T, decltype(act)>, blocks(a), kThreads, 0, stream)(a, act);
    });
  });
}

}  // namespace tessera::ops::glu::cuda
