// What moves rows and what acts on them between the products. All are bound by memory: rows are read and written once,
// 16 bytes a thread and access.
//
//   gather    2 R L elements (R rows, padding included)
//   activate  3 R F                      gate, up -> h
//   derive    6 R F                      gate, up, t -> dgate over t, dup, p h; dp = <h, t> on the way
//   combine   (R + T) L                  k rows of a token summed in float32, in the order of the slots
//
// How many rows there are is known on the GPU alone: grids cover the capacity, and what lies past the last block
// returns at once.
#include "core/cuda/kernel.h"
#include "core/cuda/piece.h"
#include "ops/experts/cuda/order.h"
#include "ops/glu/cuda/math.h"

namespace tessera::ops::experts::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A warp copies kCopies rows, all of them on their way at once. `rows` are whole blocks, so all are there or none.
constexpr int kCopies = 4;
template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const T* from, int64_t stride, int64_t width, int64_t top_k, const int64_t* slots,
                  const int64_t* rows, bool whole, T* to) {
  const int64_t row = (int64_t(blockIdx.x) * kWarps + threadIdx.x / 32) * kCopies;
  if (row >= *rows) return;
  const T* source[kCopies];
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    const int64_t slot = slots[row + i];
    source[i] = slot < 0 ? nullptr : from + slot / top_k * stride;
  }
  for (int64_t c = threadIdx.x % 32 * 8; c < width; c += 32 * 8) {
    Piece<T> x[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) x[i] = load_piece(source[i] + c, source[i] == nullptr ? 0 : width - c, whole);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) store_piece(x[i], to + (row + i) * width + c, width - c, whole);
  }
}

// Rows of whole blocks of any width are a multiple of eight elements together.
template <class T, class Act>
__global__ void __launch_bounds__(kThreads)
    activate_kernel(Act act, const T* gate, const T* up, int64_t width, const int64_t* rows, T* h) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= *rows * width) return;
  float g[8], v[8];
  load8(gate + i, g);
  load8(up + i, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) g[j] = act.value(g[j], v[j]);
  store8(h + i, g);
}

constexpr int kAtOnce = 2;  // pieces of a lane

template <class T>
struct DeriveArguments {
  int64_t width;
  bool whole;
  const int64_t *rows = nullptr, *slots = nullptr;
  const float* weights = nullptr;
  const T *gate = nullptr, *up = nullptr;
  T *t = nullptr, *dup = nullptr, *h = nullptr;
  float* dweights = nullptr;
};

template <class T, class Act>
__global__ void __launch_bounds__(kThreads) derive_kernel(Act act, DeriveArguments<T> a) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= *a.rows) return;
  const int lane = int(threadIdx.x % 32);
  const int64_t slot = a.slots[row];
  const float p = slot < 0 ? 0.0f : a.weights[slot];
  float dot = 0;
  for (int64_t first = lane * 8; first < a.width; first += kAtOnce * 32 * 8) {
    Piece<T> gates[kAtOnce], ups[kAtOnce], ts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t c = first + i * 32 * 8, at = row * a.width + c, left = a.width - c;
      gates[i] = load_piece(a.gate + at, left, a.whole);
      ups[i] = load_piece(a.up + at, left, a.whole);
      ts[i] = load_piece(a.t + at, left, a.whole);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t c = first + i * 32 * 8, at = row * a.width + c, left = a.width - c;
      float gate[8], up[8], t[8], h[8];
      gates[i].convert(gate), ups[i].convert(up), ts[i].convert(t);
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // elements past the row are 0 and give 0
        const auto value = act.derivatives(gate[j], up[j]);
        dot += value.h * t[j];
        gate[j] = p * t[j] * value.gate;
        up[j] = p * t[j] * value.up;
        h[j] = p * value.h;
      }
      store8(a.t + at, left, a.whole, gate);
      store8(a.dup + at, left, a.whole, up);
      store8(a.h + at, left, a.whole, h);
    }
  }
  dot = warp_sum(dot);
  if (lane == 0 && slot >= 0) a.dweights[slot] = dot;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const T* from, int64_t width, int64_t pieces, int64_t tokens, int64_t top_k, const int64_t* rows,
                   const float* weights, bool whole, T* to, int64_t stride) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = i / pieces, c = i % pieces * 8;
  if (token >= tokens) return;
  float sum[8] = {};
#pragma unroll 4
  for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
    const int64_t row = rows[slot];
    if (row < 0) continue;
    const float p = weights == nullptr ? 1.0f : weights[slot];
    float x[8];
    load8(from + row * width + c, width - c, whole, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += p * x[j];
  }
  store8(to + token * stride + c, width - c, whole, sum);
}

// Block (e, part) adds its part of expert e's rows, which are neighbours; padding rows come after them. A thread takes
// eight elements at a time, or one where rows cannot be read so.
template <class T>
__global__ void __launch_bounds__(kThreads)
    square_parts_kernel(const T* rows, int64_t width, const int64_t* offsets, const int64_t* counts, double* parts) {
  __shared__ double shared[kThreads / 32];
  const int64_t expert = blockIdx.x / kSquareParts, part = blockIdx.x % kSquareParts;
  const T* first = rows + offsets[expert] * width;  // a multiple of 128 rows: aligned at any width
  const int64_t elements = counts[expert] * width, pieces = (elements + 7) / 8;
  const int64_t end = pieces * (part + 1) / kSquareParts;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = pieces * part / kSquareParts + threadIdx.x; i < end; i += kThreads) {
    float x[8];
    load8(first + i * 8, elements - i * 8, true, x);
    float square = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) square += x[j] * x[j];
    sum += double(square);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_square_parts_kernel(const double* parts, int64_t experts, double* squares) {
  const int64_t expert = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (expert >= experts) return;
  double sum = 0;
  for (int part = 0; part < kSquareParts; ++part) sum += parts[expert * kSquareParts + part];
  squares[expert] += sum;
}

const int64_t* row_count(const Dims& d, const Saved& saved) { return saved.offsets.gpu<int64_t>() + d.experts; }

}  // namespace

void gather_rows(GpuStream stream, const Dims& d, const Saved& saved, const View& from, const View& to) {
  dispatch(from.dtype(), [&](auto element) {
    using T = decltype(element);
    launch(gather_kernel<T>, ceil_div(to.rows(), kWarps * kCopies), kThreads, 0, stream)(
        from.gpu<T>(), from.row_stride(), d.width, d.top_k, saved.slots.gpu<int64_t>(), row_count(d, saved),
        eights(from, to), to.gpu<T>());
  });
}

void activate(GpuStream stream, const Dims& d, const Saved& saved, const View& h) {
  dispatch(h.dtype(), [&](auto element) {
    using T = decltype(element);
    glu::cuda::dispatch_activation(d.activation, [&](auto act) {
      launch(activate_kernel<T, decltype(act)>, ceil_div(h.elements(), kThreads * 8), kThreads, 0, stream)(
          act, saved.gate.gpu<T>(), saved.up.gpu<T>(), d.hidden, row_count(d, saved), h.gpu<T>());
    });
  });
}

void derive(GpuStream stream, const Dims& d, const Saved& saved, const View& weights, const View& t, const View& dup,
            const View& h, const View& dweights) {
  dweights.zero();
  dispatch(t.dtype(), [&](auto element) {
    using T = decltype(element);
    DeriveArguments<T> a{.width = d.hidden, .whole = eights(saved.gate, saved.up, t, dup, h)};
    a.rows = row_count(d, saved), a.slots = saved.slots.gpu<int64_t>();
    a.weights = weights.gpu<float>(), a.dweights = dweights.gpu<float>();
    a.gate = saved.gate.gpu<T>(), a.up = saved.up.gpu<T>();
    a.t = t.gpu<T>(), a.dup = dup.gpu<T>(), a.h = h.gpu<T>();
    glu::cuda::dispatch_activation(d.activation, [&](auto act) {
      launch(derive_kernel<T, decltype(act)>, ceil_div(t.rows(), kWarps), kThreads, 0, stream)(act, a);
    });
  });
}

void add_squares(GpuStream stream, const Dims& d, const Saved& saved, const View& rows, const View& parts,
                 const View& squares) {
  dispatch(rows.dtype(), [&](auto element) {
    using T = decltype(element);
    launch(square_parts_kernel<T>, d.experts * kSquareParts, kThreads, 0, stream)(
        rows.gpu<T>(), d.width, saved.offsets.gpu<int64_t>(), saved.counts.gpu<int64_t>(), parts.gpu<double>());
  });
  launch(add_square_parts_kernel, ceil_div(d.experts, kThreads), kThreads, 0, stream)(parts.gpu<double>(), d.experts,
                                                                                      squares.gpu<double>());
}

void combine_rows(GpuStream stream, const Dims& d, const Saved& saved, const View& from, const View& weights,
                  const View& to) {
  dispatch(from.dtype(), [&](auto element) {
    using T = decltype(element);
    const int64_t pieces = ceil_div(d.width, 8);  // of 8 elements in a row, a thread each
    launch(combine_kernel<T>, ceil_div(d.tokens * pieces, kThreads), kThreads, 0, stream)(
        from.gpu<T>(), d.width, pieces, d.tokens, d.top_k, saved.rows.gpu<int64_t>(),
        weights.present() ? weights.gpu<float>() : nullptr, eights(from, to), to.gpu<T>(), to.row_stride());
  });
}

}  // namespace tessera::ops::experts::cuda
