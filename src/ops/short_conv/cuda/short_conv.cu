// Short convolution on the GPU. With p the inputs and da_t = dy_t s (1 + a_t (1 - s)), s = sigmoid(a_t),
//
//   a_t = sum_j w[j] p_{t-W+1+j},   y_t = a_t s,   dp_u = sum_j w[j] da_{u+W-1-j},   dw[j] = sum_t da_t p_{t-W+1+j}
//
// The floor is one read of x and one write of y, in the backward also one read of dy. A thread has 4 neighbouring
// channels and walks along a strip of tokens with the last W inputs in its registers (8 channels would need 200
// registers in the backward, and leave too few threads to keep the memory busy); a warp is 128 channels of one strip,
// so that a document's end is the same event for all its lanes. Only the W-1 rows before a strip (in the backward also
// behind it) are read twice, mostly from the cache: the strips of a block are neighbours.
//
// Positions u from -(W-1) to -1 of a document are its initial window. Weight gradients are summed in registers along a
// strip, over a block's strips in order, and over the kPartials blocks in order: the same bits in every run.
#include <type_traits>

#include "core/cuda/fast_math.h"
#include "core/cuda/kernel.h"
#include "ops/short_conv/cuda.h"

namespace tessera::ops::short_conv::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kOwn = 4;           // channels of a thread
constexpr int kTile = 32 * kOwn;  // channels of a block
constexpr int kStrip = 8;         // tokens of a warp in the forward, all asked for at once
constexpr int kAhead = 4;         // positions that the backward asks for at once, while it works on as many
constexpr int kMaxWidth = 8;

// A thread's channels of one row as they lie in memory: half the registers of floats where they are bf16.
template <class T>
using Packed = std::conditional_t<sizeof(T) == 2, uint2, float4>;

__device__ void unpack(const uint2& packed, float (&x)[kOwn]) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
  const float2 low = __bfloat1622float2(pairs[0]), high = __bfloat1622float2(pairs[1]);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}
__device__ void unpack(const float4& packed, float (&x)[kOwn]) {
  x[0] = packed.x, x[1] = packed.y, x[2] = packed.z, x[3] = packed.w;
}
template <class T>
__device__ Packed<T> pack(const float (&x)[kOwn]) {
  if constexpr (sizeof(T) == 2) {
    uint2 packed;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
    pairs[0] = __floats2bfloat162_rn(x[0], x[1]), pairs[1] = __floats2bfloat162_rn(x[2], x[3]);
    return packed;
  } else {
    return make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <class T>
struct Arguments {
  int64_t tokens, channels, tiles;
  bool whole;  // a thread's channels all exist and can be read at once
  int64_t documents;
  const int64_t* offsets;  // (documents + 1)
  const T* x;
  const float* weight;
  const T* initial_window;  // of the first documents: all, one or none
  int64_t windows;
  T* y = nullptr;  // forward
  T* final_window = nullptr;
  const T* dy = nullptr;  // backward, from here on
  T* dx = nullptr;
  T* d_window = nullptr;  // of the first documents, as many as are wanted
  int64_t d_windows = 0;
  float* partials = nullptr;

  __device__ Packed<T> load(const T* rows, int64_t row, int64_t channel) const {
    const T* from = rows + row * channels + channel;
    if (whole) return *reinterpret_cast<const Packed<T>*>(from);
    Packed<T> packed = {};
    T* to = reinterpret_cast<T*>(&packed);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (channel + i < channels) to[i] = from[i];
    }
    return packed;
  }
  __device__ void store(T* rows, int64_t row, int64_t channel, const float (&x)[kOwn]) const {
    T* to = rows + row * channels + channel;
    if (whole) {
      *reinterpret_cast<Packed<T>*>(to) = pack<T>(x);
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (channel + i < channels) to[i] = from_float<T>(x[i]);
    }
  }
};

// The document of token t < T, never an empty one: the last that begins at or before it.
__device__ int64_t document_of(const int64_t* offsets, int64_t documents, int64_t t) {
  int64_t low = 0, high = documents;  // offsets[low] <= t < offsets[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The weights of a block's channels, taps outermost: the order in which a thread's channels are neighbours.
template <int W, class T>
__device__ void stage_taps(const Arguments<T>& a, int64_t first_channel, float (&taps)[W][kTile]) {
  for (int e = threadIdx.x; e < W * kTile; e += kThreads) {
    const int channel = e / W, j = e % W;
    const bool inside = first_channel + channel < a.channels;
    taps[j][channel] = inside ? a.weight[first_channel * W + e] : 0.0f;
  }
  __syncthreads();
}
template <int W>
__device__ void own_taps(const float (&taps)[W][kTile], float (&w)[W][kOwn]) {
#pragma unroll
  for (int j = 0; j < W; ++j) {
    unpack(*reinterpret_cast<const float4*>(&taps[j][threadIdx.x % 32 * kOwn]), w[j]);
  }
}

// The W-1 inputs before position u of document n, which begins at token `begin`, into rows 0 to W-2. Row W-1 is the
// current token's.
template <int W, class T>
__device__ void load_history(const Arguments<T>& a, int64_t n, int64_t begin, int64_t u, int64_t channel,
                             float (&rows)[W][kOwn]) {
#pragma unroll
  for (int j = 0; j < W - 1; ++j) {
    const int64_t p = u - (W - 1) + j;
    if (p >= 0) {
      unpack(a.load(a.x, begin + p, channel), rows[j]);
    } else if (n < a.windows) {
      unpack(a.load(a.initial_window, n * (W - 1) + W - 1 + p, channel), rows[j]);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) rows[j][i] = 0;
    }
  }
}

template <int W>
__device__ void shift(float (&rows)[W][kOwn]) {
#pragma unroll
  for (int j = 0; j < W - 1; ++j) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) rows[j][i] = rows[j + 1][i];
  }
}

template <int W>
__device__ float convolve(const float (&w)[W][kOwn], const float (&rows)[W][kOwn], int i) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < W; ++j) sum += w[j][i] * rows[j][i];
  return sum;
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments<T> a) {
  alignas(16) __shared__ float taps[W][kTile];
  const int64_t first_channel = blockIdx.x % a.tiles * kTile, channel = first_channel + threadIdx.x % 32 * kOwn;
  stage_taps<W>(a, first_channel, taps);
  const int64_t first = (blockIdx.x / a.tiles * kWarps + threadIdx.x / 32) * kStrip;
  if (first >= a.tokens || channel >= a.channels) return;
  float w[W][kOwn], rows[W][kOwn];
  Packed<T> strip[kStrip];
#pragma unroll
  for (int k = 0; k < kStrip; ++k) {
    if (first + k < a.tokens) strip[k] = a.load(a.x, first + k, channel);
  }
  int64_t n = document_of(a.offsets, a.documents, first), end = a.offsets[n + 1];
  load_history<W>(a, n, a.offsets[n], first - a.offsets[n], channel, rows);
  own_taps<W>(taps, w);
#pragma unroll
  for (int k = 0; k < kStrip; ++k) {
    const int64_t t = first + k;
    if (t >= a.tokens) return;
    if (t == end) {  // the next document that is not empty begins here
      while (end == t) end = a.offsets[++n + 1];
      load_history<W>(a, n, t, 0, channel, rows);
    }
    unpack(strip[k], rows[W - 1]);
    float y[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float sum = convolve<W>(w, rows, i);
      y[i] = sum * fast_sigmoid(sum).value;
    }
    a.store(a.y, t, channel, y);
    shift<W>(rows);
  }
}

// Row i of the final window is position length - (W-1) + i. One thread goes through the rows in ascending order, so
// that it may be the initial window's memory: row i then comes from a row at or behind it.
template <class T, int W>
__global__ void __launch_bounds__(kThreads) final_window_kernel(Arguments<T> a, int64_t pieces) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x, n = index / pieces,
                channel = index % pieces * kOwn;
  if (n >= a.documents) return;
  const int64_t begin = a.offsets[n], length = a.offsets[n + 1] - begin;
  for (int i = 0; i < W - 1; ++i) {
    const int64_t p = length - (W - 1) + i;
    float row[kOwn] = {};
    if (p >= 0) {
      unpack(a.load(a.x, begin + p, channel), row);
    } else if (n < a.windows) {
      unpack(a.load(a.initial_window, n * (W - 1) + W - 1 + p, channel), row);
    }
    a.store(a.final_window, n * (W - 1) + i, channel, row);
  }
}

// x and dy of kAhead positions.
template <class T>
struct Chunk {
  Packed<T> x[kAhead], dy[kAhead];

  __device__ void load(const Arguments<T>& a, int64_t begin, int64_t v, int64_t behind, int64_t channel) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (v + k >= behind) return;
      x[k] = a.load(a.x, begin + v + k, channel);
      dy[k] = a.load(a.dy, begin + v + k, channel);
    }
  }
};

// da of the current token, whose inputs are in `rows`.
template <int W>
__device__ void linear_gradient(const float (&w)[W][kOwn], const float (&rows)[W][kOwn], const float (&dy)[kOwn],
                                float (&da)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float sum = convolve<W>(w, rows, i);
    const Sigmoid s = fast_sigmoid(sum);
    da[i] = dy[i] * s.value * (1.0f + sum * s.complement);
  }
}

// Positions [from, to) of document n. da runs W-1 positions ahead of dp; the part with the document's first token also
// has the gradient of its initial window.
template <int W, class T>
__device__ void backward_part(const Arguments<T>& a, int64_t n, int64_t from, int64_t to, int64_t channel,
                              const float (&w)[W][kOwn], float (&dweight)[W][kOwn]) {
  const int64_t begin = a.offsets[n], length = a.offsets[n + 1] - begin;
  const int64_t behind = min(to + W - 1, length);  // the first position whose da is not wanted or does not exist
  const bool window = from == 0 && n < a.d_windows;
  float rows[W][kOwn], da[W][kOwn] = {};  // inputs and da of positions v - W + 1 to v
  Chunk<T> next;
  next.load(a, begin, from, behind, channel);
  load_history<W>(a, n, begin, from, channel, rows);
  for (int64_t first = from; first < to + W - 1; first += kAhead) {
    const Chunk<T> chunk = next;
    next.load(a, begin, first + kAhead, behind, channel);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t v = first + k, u = v - (W - 1);
      if (v >= to + W - 1) return;
      float dp[kOwn] = {};
      if (v < behind) {
        float dy[kOwn];
        unpack(chunk.x[k], rows[W - 1]);
        unpack(chunk.dy[k], dy);
        linear_gradient<W>(w, rows, dy, da[W - 1]);
      } else {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) da[W - 1][i] = 0;
      }
#pragma unroll
      for (int j = 0; j < W; ++j) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          if (v < to) dweight[j][i] += da[W - 1][i] * rows[j][i];
          dp[i] += w[j][i] * da[W - 1 - j][i];
        }
      }
      if (u >= from) {
        a.store(a.dx, begin + u, channel, dp);
      } else if (window) {
        a.store(a.d_window, n * (W - 1) + W - 1 + u, channel, dp);
      }
      shift<W>(rows);
      shift<W>(da);
    }
  }
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 && W <= 4 ? 2 : 1) backward_kernel(Arguments<T> a) {
  alignas(16) __shared__ float taps[W][kTile];
  const int64_t first_channel = blockIdx.x % a.tiles * kTile, partial = blockIdx.x / a.tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t channel = first_channel + lane * kOwn;
  stage_taps<W>(a, first_channel, taps);
  float w[W][kOwn], dweight[W][kOwn] = {};
  own_taps<W>(taps, w);
  const int64_t strip = partial * kWarps + warp;
  const int64_t end = a.tokens * (strip + 1) / (kPartials * kWarps);
  int64_t t = a.tokens * strip / (kPartials * kWarps);
  if (channel < a.channels && t < end) {
    for (int64_t n = document_of(a.offsets, a.documents, t); t < end; ++n) {
      const int64_t begin = a.offsets[n], stop = min(a.offsets[n + 1], end);
      if (t < stop) backward_part<W>(a, n, t - begin, stop - begin, channel, w, dweight);
      t = max(t, stop);
    }
  }
  __syncthreads();  // the taps are in registers: their memory receives the sums, one warp after the other
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          float& sum = taps[j][lane * kOwn + i];
          sum = turn == 0 ? dweight[j][i] : sum + dweight[j][i];
        }
      }
    }
    __syncthreads();
  }
  for (int e = threadIdx.x; e < W * kTile; e += kThreads) {
    const int j = e / kTile, c = e % kTile;
    if (first_channel + c < a.channels) a.partials[(partial * W + j) * a.channels + first_channel + c] = taps[j][c];
  }
}

__global__ void add_partials(const float* partials, int64_t channels, int64_t width, float* dweight) {
  const int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x, elements = width * channels;
  if (e >= elements) return;
  float sum = 0;
  for (int64_t p = 0; p < kPartials; ++p) sum += partials[p * elements + e];
  dweight[e % channels * width + e / channels] += sum;
}

// An empty document has no part, and its window feeds nothing.
template <class T>
__global__ void zero_windows_of_empty(const int64_t* offsets, int64_t elements, int64_t each, T* d_window) {
  const int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= elements) return;
  const int64_t n = e / each;
  if (offsets[n] == offsets[n + 1]) d_window[e] = from_float<T>(0.0f);
}

// Calls f<W>(), so that loops over taps are unrolled.
template <class F, int W = 1>
void with_width(int64_t width, F&& f) {
  if (width == W) return f.template operator()<W>();
  if constexpr (W < kMaxWidth) with_width<F, W + 1>(width, std::forward<F>(f));
}

// An absent view is.
bool aligned(const View& v) { return reinterpret_cast<uintptr_t>(v.data()) % 32 == 0; }

template <class T>
Arguments<T> arguments(const Dims& d, const Inputs& in, bool whole) {
  TESSERA_CHECK(in.documents.gpu_offsets != nullptr, "short_conv on the GPU needs the document offsets there");
  return {.tokens = d.tokens,
          .channels = d.channels,
          .tiles = ceil_div(d.channels, kTile),
          .whole = whole && aligned(in.initial_window),
          .documents = in.documents.count(),
          .offsets = in.documents.gpu_offsets,
          .x = in.x.gpu<T>(),
          .weight = in.weight.gpu<float>(),
          .initial_window = in.initial_window.present() ? in.initial_window.gpu<T>() : nullptr,
          .windows = in.initial_window.present() ? in.initial_window.dim(0) : 0};
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out) {
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a = arguments<T>(d, in, eights(in.x, out.y) && aligned(out.final_window));
    a.y = out.y.gpu<T>();
    with_width(d.width, [&]<int W>() {
      launch(forward_kernel<T, W>, a.tiles * ceil_div(d.tokens, kWarps * kStrip), kThreads, 0, stream)(a);
      if (!out.final_window.present() || W == 1) return;
      a.final_window = out.final_window.gpu<T>();
      const int64_t pieces = ceil_div(d.channels, kOwn);
      launch(final_window_kernel<T, W>, ceil_div(a.documents * pieces, kThreads), kThreads, 0, stream)(a, pieces);
    });
  });
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
              const View& partials) {
  dispatch(in.x.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a = arguments<T>(d, in, eights(in.x, dout.y, grads.x) && aligned(grads.initial_window));
    a.dy = dout.y.gpu<T>(), a.dx = grads.x.gpu<T>();
    a.partials = partials.gpu<float>();
    if (grads.initial_window.present()) {
      a.d_window = grads.initial_window.gpu<T>();
      a.d_windows = grads.initial_window.dim(0);
      const int64_t elements = grads.initial_window.elements(), each = (d.width - 1) * d.channels;
      launch(zero_windows_of_empty<T>, ceil_div(elements, kThreads), kThreads, 0, stream)(a.offsets, elements, each,
                                                                                          a.d_window);
    }
    if (d.tokens == 0) return;
    with_width(d.width, [&]<int W>() { launch(backward_kernel<T, W>, a.tiles * kPartials, kThreads, 0, stream)(a); });
    launch(add_partials, ceil_div(d.width * d.channels, kThreads), kThreads, 0, stream)(a.partials, d.channels, d.width,
                                                                                        grads.weight.gpu<float>());
  });
}

}  // namespace tessera::ops::short_conv::cuda
