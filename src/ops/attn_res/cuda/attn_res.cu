// Attention Residuals on the GPU. With q = gain o query, r_i = 1 / rms(v_i), G = dh:
//
//   a_i = r_i <q, v_i>;   da_i = alpha_i sum_j alpha_j (<G, v_i> - <G, v_j>);   c_i = da_i r_i
//   dv_i += alpha_i G + c_i (q - (a_i r_i / D) v_i);   dq = sum over tokens and i of c_i v_i
//   dquery += gain o dq;   dgain += query o dq
//
// A block has a token: each thread N pieces of 8 neighbouring elements of it, and of the next token of its range after
// that. Forward reads S sources and writes h, the floor: it takes the sources four at a time (two where N is 2), finds
// their scores in one reduction, and mixes them under a running maximum, as in online softmax. Backward needs all
// <G, v_i> before the first gradient, and so goes through the sources twice, S + 1 reads from memory and S from the
// caches, before it reads and writes the S gradients. (cpu.cc says why <G, h> will not do.)
//
// Up to kResident sources of whole pieces, as the block form has, stay in registers as they are stored, and so do their
// gradients: everything a token needs is on its way before the first barrier, and is read once.
//
// dq is summed in registers along a block's range of tokens, then over the blocks in order: the same bits in every run.
#include "core/cuda/fast_math.h"
#include "core/cuda/kernel.h"
#include "core/cuda/partials.h"
#include "core/cuda/piece.h"
#include "ops/attn_res/cuda.h"

namespace tessera::ops::attn_res::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kMaxThreads = 512, kMaxWarps = kMaxThreads / 32;
constexpr int kResident = 8;  // the most sources of a token that lie in registers

template <class T>
struct Arguments {
  int64_t tokens, width;
  int sources;
  float eps;
  bool whole;  // rows can be read eight elements at a time
  const float *query, *gain;
  float *alpha = nullptr, *rrms = nullptr, *score = nullptr;  // forward: null where they are not kept
  T* h = nullptr;                                             // forward
  const T* dh = nullptr;                                      // backward, from here on
  float* partials = nullptr;
  const T* source[kMaxSources] = {};
  T* dsource[kMaxSources] = {};

  __device__ int64_t first_token() const { return tokens * blockIdx.x / gridDim.x; }
  __device__ int64_t last_token() const { return tokens * (blockIdx.x + 1) / gridDim.x; }
};

// The thread's elements of a row.
template <int N, class E>
__device__ void load_row(const E* row, int64_t width, bool whole, float (&x)[N][8]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = (int64_t(n) * blockDim.x + threadIdx.x) * 8;
    load8(row + c, width - c, whole, x[n]);
  }
}
template <int N, class E>
__device__ void store_row(E* row, int64_t width, bool whole, const float (&x)[N][8]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int64_t c = (int64_t(n) * blockDim.x + threadIdx.x) * 8;
    store8(row + c, width - c, whole, x[n]);
  }
}

template <int N, class T>
__device__ void load_folded(const Arguments<T>& a, float (&q)[N][8]) {
  float gain[N][8];
  load_row(a.query, a.width, a.whole, q);
  load_row(a.gain, a.width, a.whole, gain);
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) q[n][i] *= gain[n][i];
  }
}

template <int N>
__device__ float dot(const float (&x)[N][8], const float (&y)[N][8]) {
  float sum = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[n][i] * y[n][i];
  }
  return sum;
}

// Sums of K values (a power of two) over the block, the same in every thread, in one barrier: successive calls use the
// two halves of their memory by turns, and nobody is a whole call ahead of another thread that still reads.
//
// In a warp each step adds two lines of lanes, which hand each other the half of the values that the other keeps: K - 1
// exchanges until a lane has one value, then a few until all lanes are in it, where K separate sums take 5 K.
template <int K>
struct BlockSums {
  static_assert(K >= 1 && K <= 32 && (K & (K - 1)) == 0);
  struct alignas(4 * K) Values {
    float of[K];
  };
  Values (*halves)[kMaxWarps];
  int turn = 0;

  // Lanes `kOffset` apart hand each other values until each keeps one. In steps that the compiler sees: what is indexed
  // by a variable does not stay in registers.
  template <int kKept, int kOffset>
  __device__ static void fold(float (&x)[K], int lane) {
    if constexpr (kOffset > 0) {
      const bool upper = (lane & kOffset) != 0;
      if constexpr (kKept == 0) x[0] += __shfl_xor_sync(0xffffffffu, x[0], kOffset);
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const float mine = upper ? x[kKept + k] : x[k], other = upper ? x[k] : x[kKept + k];
        x[k] = mine + __shfl_xor_sync(0xffffffffu, other, kOffset);
      }
      fold<kKept / 2, kOffset / 2>(x, lane);
    }
  }

  __device__ void operator()(float (&x)[K]) {
    Values* of_warps = halves[turn];
    turn ^= 1;
    const int lane = threadIdx.x % 32;
    fold<K / 2, 16>(x, lane);
    // A lane's value is the one that its upper bits count.
    if (lane % (32 / K) == 0) of_warps[threadIdx.x / 32].of[lane / (32 / K)] = x[0];
    __syncthreads();
    Values sums;
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = 0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) {
      sums = of_warps[w];
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] += sums.of[k];
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(const __grid_constant__ Arguments<T> a) {
  constexpr int B = 4 / N;  // sources at a time
  __shared__ typename BlockSums<2 * B>::Values halves[2][kMaxWarps];
  __shared__ float scores[kMaxSources];
  BlockSums<2 * B> block_sums{halves};
  float q[N][8];
  load_folded(a, q);
  for (int64_t t = a.first_token(); t < a.last_token(); ++t) {
    float h[N][8] = {}, top = -INFINITY, total = 0;
    for (int first = 0; first < a.sources; first += B) {
      float v[B][N][8], sums[2 * B];  // squares, then products with q
#pragma unroll
      for (int b = 0; b < B; ++b) {
        const int s = min(first + b, a.sources - 1);
        load_row(a.source[s] + t * a.width, a.width, a.whole, v[b]);
      }
#pragma unroll
      for (int b = 0; b < B; ++b) sums[b] = dot(v[b], v[b]), sums[B + b] = dot(q, v[b]);
      block_sums(sums);
#pragma unroll
      for (int b = 0; b < B; ++b) {
        const int s = first + b;
        if (s >= a.sources) break;
        const float rrms = rsqrtf(sums[b] / float(a.width) + a.eps), score = sums[B + b] * rrms;
        const float new_top = fmaxf(top, score), keep = fast_exp(top - new_top), weight = fast_exp(score - new_top);
        top = new_top;
        total = total * keep + weight;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 8; ++i) h[n][i] = h[n][i] * keep + weight * v[b][n][i];
        }
        if (threadIdx.x == 0) {
          scores[s] = score;
          if (a.score != nullptr) a.score[t * a.sources + s] = score, a.rrms[t * a.sources + s] = rrms;
        }
      }
    }
    const float inverse = 1.0f / total;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) h[n][i] *= inverse;
    }
    store_row(a.h + t * a.width, a.width, a.whole, h);
    if (a.alpha != nullptr) {
      __syncthreads();  // scores are there; the next token's come behind its first reduction
      for (int s = threadIdx.x; s < a.sources; s += blockDim.x) {
        a.alpha[t * a.sources + s] = fast_exp(scores[s] - top) * inverse;
      }
    }
  }
}

// dv += alpha G + c q - pull v
struct Coefficients {
  float alpha, c, pull;
};
template <class T>
__device__ Coefficients coefficients(const Arguments<T>& a, int64_t t, int s, const float* products) {
  const float* alphas = a.alpha + t * a.sources;
  float sum = 0;
  for (int j = 0; j < a.sources; ++j) sum += alphas[j] * (products[s] - products[j]);
  const float alpha = alphas[s], rrms = a.rrms[t * a.sources + s], c = alpha * sum * rrms;
  return {alpha, c, c * a.score[t * a.sources + s] * rrms / float(a.width)};
}

template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(const __grid_constant__ Arguments<T> a) {
  constexpr int B = 4 / N, U = 2 / N;  // sources at a time: of the products <G, v>, of the updates
  __shared__ typename BlockSums<B>::Values halves[2][kMaxWarps];
  __shared__ float products[kMaxSources];
  __shared__ Coefficients of_sources[kMaxSources];
  BlockSums<B> block_sums{halves};
  float q[N][8], dq[N][8] = {};
  load_folded(a, q);
  for (int64_t t = a.first_token(); t < a.last_token(); ++t) {
    const int64_t row = t * a.width;
    float g[N][8];
    load_row(a.dh + row, a.width, a.whole, g);
    for (int first = 0; first < a.sources; first += B) {
      float v[B][N][8], sums[B];
#pragma unroll
      for (int b = 0; b < B; ++b) {
        load_row(a.source[min(first + b, a.sources - 1)] + row, a.width, a.whole, v[b]);
      }
#pragma unroll
      for (int b = 0; b < B; ++b) sums[b] = dot(g, v[b]);
      block_sums(sums);
#pragma unroll
      for (int b = 0; b < B; ++b) {
        if (threadIdx.x == 0 && first + b < a.sources) products[first + b] = sums[b];
      }
    }
    __syncthreads();  // products are there; the next token's come behind its first reduction
    for (int s = threadIdx.x; s < a.sources; s += blockDim.x) of_sources[s] = coefficients(a, t, s, products);
    __syncthreads();
    for (int first = 0; first < a.sources; first += U) {
      float v[U][N][8], dv[U][N][8];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int s = min(first + u, a.sources - 1);
        load_row(a.source[s] + row, a.width, a.whole, v[u]);
        load_row(a.dsource[s] + row, a.width, a.whole, dv[u]);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int s = first + u;
        if (s >= a.sources) break;
        const auto [alpha, c, pull] = of_sources[s];
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            dv[u][n][i] += alpha * g[n][i] + c * q[n][i] - pull * v[u][n][i];
            dq[n][i] += c * v[u][n][i];
          }
        }
        store_row(a.dsource[s] + row, a.width, a.whole, dv[u]);
      }
    }
  }
  store_row(a.partials + blockIdx.x * a.width, a.width, a.whole, dq);
}

// S: room for sources; what exceeds theirs costs time.
template <class T, int S>
__global__ void __launch_bounds__(kMaxThreads) resident_forward_kernel(const __grid_constant__ Arguments<T> a) {
  __shared__ typename BlockSums<2 * S>::Values halves[2][kMaxWarps];
  BlockSums<2 * S> block_sums{halves};
  const int64_t column = int64_t(threadIdx.x) * 8;
  const bool present = column < a.width;
  float q[1][8];
  load_folded(a, q);
  constexpr bool kAhead = sizeof(T) == 2;  // the next token's are on their way while this one's are reduced
  Piece<T> v[S], next[S];
  const auto load = [&](Piece<T>(&to)[S], int64_t t) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      to[s] = load_piece(a.source[s] + t * a.width + column, present && s < a.sources && t < a.last_token());
    }
  };
  if constexpr (kAhead) load(next, a.first_token());
  for (int64_t t = a.first_token(); t < a.last_token(); ++t) {
    if constexpr (kAhead) {
#pragma unroll
      for (int s = 0; s < S; ++s) v[s] = next[s];
      load(next, t + 1);
    } else {
      load(v, t);
    }
    float sums[2 * S];  // squares, then products with q
#pragma unroll
    for (int s = 0; s < S; ++s) {
      float x[8];
      v[s].convert(x);
      sums[s] = sums[S + s] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[s] += x[i] * x[i], sums[S + s] += q[0][i] * x[i];
    }
    block_sums(sums);
    float top = -INFINITY, total = 0, rrms[S], score[S], h[8] = {};
#pragma unroll
    for (int s = 0; s < S; ++s) {
      rrms[s] = rsqrtf(sums[s] / float(a.width) + a.eps);
      score[s] = s < a.sources ? sums[S + s] * rrms[s] : -INFINITY;
      top = fmaxf(top, score[s]);
    }
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const float weight = fast_exp(score[s] - top);
      float x[8];
      v[s].convert(x);
      total += weight;
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] += weight * x[i];
    }
    const float inverse = 1.0f / total;
#pragma unroll
    for (int i = 0; i < 8; ++i) h[i] *= inverse;
    if (present) store8(a.h + t * a.width + column, h);
    if (a.alpha == nullptr) continue;
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (int(threadIdx.x) != s || s >= a.sources) continue;
      a.alpha[t * a.sources + s] = fast_exp(score[s] - top) * inverse;
      a.rrms[t * a.sources + s] = rrms[s], a.score[t * a.sources + s] = score[s];
    }
  }
}

// Lane s of every warp makes the coefficients of source s from what it loaded of the forward's.
struct SourceScalars {
  float alpha = 0, rrms = 0, score = 0;
};
template <class T, int S>
__device__ Coefficients coefficients(const Arguments<T>& a, const SourceScalars& own, const float (&products)[S]) {
  float product = 0, sum = 0;
#pragma unroll
  for (int s = 0; s < S; ++s) product = int(threadIdx.x % 32) == s ? products[s] : product;
#pragma unroll
  for (int s = 0; s < S; ++s) sum += __shfl_sync(0xffffffffu, own.alpha, s) * (product - products[s]);
  const float c = own.alpha * sum * own.rrms;
  return {own.alpha, c, c * own.score * own.rrms / float(a.width)};
}

template <class T, int S>
__global__ void __launch_bounds__(kMaxThreads) resident_backward_kernel(const __grid_constant__ Arguments<T> a) {
  __shared__ typename BlockSums<S>::Values halves[2][kMaxWarps];
  BlockSums<S> block_sums{halves};
  const int64_t column = int64_t(threadIdx.x) * 8;
  const bool present = column < a.width;
  const int lane = threadIdx.x % 32;
  float q[1][8], dq[1][8] = {};
  load_folded(a, q);
  for (int64_t t = a.first_token(); t < a.last_token(); ++t) {
    const int64_t at = t * a.width + column;
    const Piece<T> dh = load_piece(a.dh + at, present);
    Piece<T> v[S], dv[S];
#pragma unroll
    for (int s = 0; s < S; ++s) v[s] = load_piece(a.source[s] + at, present && s < a.sources);
#pragma unroll
    for (int s = 0; s < S; ++s) dv[s] = load_piece(a.dsource[s] + at, present && s < a.sources);
    SourceScalars own;
    if (lane < a.sources) {
      const int64_t scalar = t * a.sources + lane;
      own = {a.alpha[scalar], a.rrms[scalar], a.score[scalar]};
    }
    float g[8], products[S];
    dh.convert(g);
#pragma unroll
    for (int s = 0; s < S; ++s) {
      float x[8];
      v[s].convert(x);
      products[s] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) products[s] += g[i] * x[i];
    }
    block_sums(products);
    const Coefficients mine = coefficients(a, own, products);
#pragma unroll
    for (int s = 0; s < S; ++s) {
      if (s >= a.sources) break;
      const float alpha = __shfl_sync(0xffffffffu, mine.alpha, s), c = __shfl_sync(0xffffffffu, mine.c, s),
                  pull = __shfl_sync(0xffffffffu, mine.pull, s);
      float x[8], dx[8];
      v[s].convert(x);
      dv[s].convert(dx);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dx[i] += alpha * g[i] + c * q[0][i] - pull * x[i];
        dq[0][i] += c * x[i];
      }
      if (present) store8(a.dsource[s] + at, dx);
    }
  }
  store_row(a.partials + blockIdx.x * a.width, a.width, a.whole, dq);
}

__global__ void __launch_bounds__(kPartialThreads)
    add_partials(const float* partials, int64_t count, int64_t width, const float* query, const float* gain,
                 float* dquery, float* dgain) {
  const float dq = sum_partials(partials, count, width);
  const int64_t c = partial_column();
  if (c >= width) return;
  dquery[c] += gain[c] * dq;
  dgain[c] += query[c] * dq;
}

// Calls f<N, S>(threads): pieces of a thread and threads that hold a row; room for sources in registers, or 0.
template <class T, class F>
void choose(const Arguments<T>& a, F&& f) {
  const auto threads = [&](int64_t pieces) { return static_cast<int>(ceil_div(a.width, pieces * 8 * 32) * 32); };
  if (a.width > kMaxThreads * 8) return f.template operator()<2, 0>(threads(2));
  if (!a.whole || a.sources > kResident) return f.template operator()<1, 0>(threads(1));
  if (a.sources <= 2) return f.template operator()<1, 2>(threads(1));
  if (a.sources <= 4) return f.template operator()<1, 4>(threads(1));
  f.template operator()<1, kResident>(threads(1));
}

// Whether the rows and vectors of these views may be read eight elements at a time.
bool eights_all(const std::vector<View>& views) {
  return std::all_of(views.begin(), views.end(), [](const View& v) { return eights(v); });
}

template <class T>
Arguments<T> arguments(const Dims& d, const Inputs& in) {
  TESSERA_CHECK(d.width <= kMaxWidth && d.sources <= kMaxSources,
                "attn_res of {} sources of width {} on the GPU; at most {} and {}", d.sources, d.width, kMaxSources,
                kMaxWidth);
  Arguments<T> a{.tokens = d.tokens,
                 .width = d.width,
                 .sources = static_cast<int>(d.sources),
                 .eps = float(d.eps),
                 .whole = eights(in.query, in.gain) && eights_all(in.sources),
                 .query = in.query.gpu<float>(),
                 .gain = in.gain.gpu<float>()};
  for (int s = 0; s < a.sources; ++s) a.source[s] = in.sources[size_t(s)].gpu<T>();
  return a;
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  dispatch(out.h.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a = arguments<T>(d, in);
    a.whole = a.whole && eights(out.h);
    a.h = out.h.gpu<T>();
    if (saved != nullptr) {
      a.alpha = saved->alpha.gpu<float>(), a.rrms = saved->rrms.gpu<float>(), a.score = saved->score.gpu<float>();
    }
    choose(a, [&]<int N, int S>(int threads) {
      const auto kernel = [] {
        if constexpr (S > 0)
          return resident_forward_kernel<T, S>;
        else
          return forward_kernel<T, N>;
      }();
      launch(kernel, std::min(d.tokens, 2 * partial_count(d)), threads, 0, stream)(a);
    });
  });
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads, const View& partials) {
  if (d.tokens == 0) return;
  dispatch(dout.h.dtype(), [&](auto element) {
    using T = decltype(element);
    Arguments<T> a = arguments<T>(d, in);
    a.whole = a.whole && eights(dout.h) && eights_all(grads.sources);
    a.alpha = saved.alpha.gpu<float>(), a.rrms = saved.rrms.gpu<float>(), a.score = saved.score.gpu<float>();
    a.dh = dout.h.gpu<T>();
    a.partials = partials.gpu<float>();
    for (int s = 0; s < a.sources; ++s) a.dsource[s] = grads.sources[size_t(s)].gpu<T>();
    choose(a, [&]<int N, int S>(int threads) {
      const auto kernel = [] {
        if constexpr (S > 0)
          return resident_backward_kernel<T, S>;
        else
          return backward_kernel<T, N>;
      }();
      launch(kernel, partial_count(d), threads, 0, stream)(a);
    });
    launch(add_partials, partial_blocks(d.width), kPartialThreads, 0, stream)(
        a.partials, partial_count(d), d.width, a.query, a.gain, grads.query.gpu<float>(), grads.gain.gpu<float>());
  });
}

}  // namespace tessera::ops::attn_res::cuda
