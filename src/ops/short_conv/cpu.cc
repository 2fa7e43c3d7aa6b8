// Short convolution on the CPU: vectors run along the channels, threads over ranges of tokens. With p the inputs and
// da_t = dy_t s (1 + a_t (1 - s)), s = sigmoid(a_t),
//
//   a_t = sum_j w[j] p_{t-W+1+j},   y_t = a_t s,   dp_u = sum_j w[j] da_{u+W-1-j},   dw[j] = sum_t da_t p_{t-W+1+j}
//
// Positions u from -(W-1) to -1 of a document are its initial window. A range of the backward computes da of the W-1
// tokens behind it once more, so that ranges share nothing.
#include "ops/short_conv/cpu.h"

#include <algorithm>
#include <type_traits>

#include "core/fast_math.h"
#include "core/parallel.h"

namespace tessera::ops::short_conv::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this a thread costs more than it saves

// Rows of the workspace lie this far apart. The rows of the inputs are often a power of two apart and so fall into the
// same few cache sets; the workspace's rows must not join them there.
int64_t row_stride(const Dims& d) { return d.channels + 16; }

// Calls f with the width as a type, so that the loop over taps is unrolled.
template <class F, int kWidth = 1>
void with_width(int64_t width, F&& f) {
  if (width == kWidth) return f(std::integral_constant<int, kWidth>{});
  if constexpr (kWidth < kMaxWidth) with_width<F, kWidth + 1>(width, std::forward<F>(f));
}

// Calls f(document, begin, end) for the parts of documents in tokens [begin, end).
template <class F>
void for_each_part(const Documents& documents, int64_t begin, int64_t end, F&& f) {
  const auto after = std::upper_bound(documents.offsets.begin(), documents.offsets.end(), begin);
  int64_t n = after - documents.offsets.begin() - 1;
  for (int64_t t = begin; t < end; ++n) {
    const int64_t stop = std::min(end, documents.end(n));
    if (t < stop) f(n, t, stop);
    t = std::max(t, stop);
  }
}

bool has_window(const View& windows, int64_t n) { return windows.present() && n < windows.rows(); }

// The input at position u >= -(W-1) of document n: a token, a row of the initial window, or zeros.
template <class Real>
const Real* input_at(const Dims& d, const Inputs& in, const Real* zeros, int64_t n, int64_t u) {
  if (u >= 0) return in.x.as<Real>() + (in.documents.begin(n) + u) * d.channels;
  if (!has_window(in.initial_window, n)) return zeros;
  return in.initial_window.as<Real>() + (n * (d.width - 1) + d.width - 1 + u) * d.channels;
}

// The W inputs under the taps at position u.
template <int W, class Real>
struct Rows {
  const Real* at[W];
  Rows(const Dims& d, const Inputs& in, const Real* zeros, int64_t n, int64_t u) {
    for (int j = 0; j < W; ++j) at[j] = input_at(d, in, zeros, n, u - W + 1 + j);
  }
};

template <class Real>
void fill_taps(const Dims& d, const Inputs& in, const Workspace& w) {
  const Real* weight = in.weight.as<Real>();
  Real* taps = w.taps.as<Real>();
  for (int64_t g = 0; g < d.channels; ++g) {
    for (int64_t j = 0; j < d.width; ++j) taps[j * row_stride(d) + g] = weight[g * d.width + j];
  }
  w.zeros.zero();
}

template <int W, class Real>
void forward_token(const Dims& d, const Rows<W, Real>& rows, const Real* taps, Real* y) {
  const int64_t channels = d.channels, stride = row_stride(d);
#pragma omp simd
  for (int64_t g = 0; g < channels; ++g) {
    Real a = 0;
    for (int j = 0; j < W; ++j) a += taps[j * stride + g] * rows.at[j][g];
    y[g] = a * fast::sigmoid(a);
  }
}

// Row i of the final window is position length - (W-1) + i. In ascending order, so that it may be the initial window's
// memory: row i then comes from a row behind it.
template <class Real>
void write_final_window(const Dims& d, const Inputs& in, const View& final_window, const Real* zeros) {
  const int64_t rows = d.width - 1, elements = rows * d.channels;
  parallel_ranges(in.documents.count(), std::max<int64_t>(1, kGrainElements / std::max<int64_t>(elements, 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t n = begin; n < end; ++n) {
                      for (int64_t i = 0; i < rows; ++i) {
                        const Real* from = input_at(d, in, zeros, n, in.documents.length(n) - rows + i);
                        Real* to = final_window.as<Real>() + (n * rows + i) * d.channels;
                        if (to != from) std::copy_n(from, d.channels, to);
                      }
                    }
                  });
}

template <int W, class Real>
void forward_part(const Dims& d, const Inputs& in, const Outputs& out, const Workspace& w, int64_t n, int64_t first,
                  int64_t last) {
  const Real *taps = w.taps.as<Real>(), *zeros = w.zeros.as<Real>();
  for (int64_t t = first; t < last; ++t) {
    const Rows<W, Real> rows(d, in, zeros, n, t - in.documents.begin(n));
    forward_token(d, rows, taps, out.y.as<Real>() + t * d.channels);
  }
}

template <int W, class Real>
void run_forward(const Dims& d, const Inputs& in, const Outputs& out, const Workspace& w) {
  fill_taps<Real>(d, in, w);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.channels, 1));
  parallel_ranges(d.tokens, grain, [&](int64_t begin, int64_t end) {
    for_each_part(in.documents, begin, end, [&](int64_t n, int64_t first, int64_t last) {
      forward_part<W, Real>(d, in, out, w, n, first, last);
    });
  });
  if (out.final_window.present()) write_final_window(d, in, out.final_window, w.zeros.as<Real>());
}

// da of one token, and its part of the tap gradients where the token is the range's own.
template <int W, bool kOwn, class Real>
void backward_token(const Dims& d, const Rows<W, Real>& rows, const Real* taps, const Real* dy, Real* da,
                    Real* d_taps) {
  const int64_t channels = d.channels, stride = row_stride(d);
#pragma omp simd
  for (int64_t g = 0; g < channels; ++g) {
    Real a = 0;
    for (int j = 0; j < W; ++j) a += taps[j * stride + g] * rows.at[j][g];
    const Real s = fast::sigmoid(a);
    const Real gradient = dy[g] * s * (1 + a * (1 - s));
    da[g] = gradient;
    if constexpr (kOwn) {
      for (int j = 0; j < W; ++j) d_taps[j * stride + g] += gradient * rows.at[j][g];
    }
  }
}

// dp at position u, from da of positions u to u + W - 1 of a document of `length` tokens: da of position v lies in row
// v mod W of d_linear; `zeros` stands for da outside the document.
template <int W, class Real>
void gather_input_gradient(const Dims& d, const Real* taps, const Real* d_linear, const Real* zeros, int64_t u,
                           int64_t length, Real* dp) {
  const int64_t channels = d.channels, stride = row_stride(d);
  const Real* da[W];
  for (int j = 0; j < W; ++j) {
    const int64_t v = u + W - 1 - j;
    da[j] = v >= 0 && v < length ? d_linear + v % W * stride : zeros;
  }
#pragma omp simd
  for (int64_t g = 0; g < channels; ++g) {
    Real sum = 0;
    for (int j = 0; j < W; ++j) sum += taps[j * stride + g] * da[j][g];
    dp[g] = sum;
  }
}

// What one range of tokens of the backward writes, beside the input gradients.
template <class Real>
struct Range {
  Real *d_taps, *d_linear;  // (W, G) each
};

// Tokens [first, last) of document n. da runs W-1 positions ahead of dp; the part with the document's first token also
// has the gradient of its initial window.
template <int W, class Real>
void backward_part(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads, const Workspace& w,
                   const Range<Real>& range, int64_t n, int64_t first, int64_t last) {
  const int64_t begin = in.documents.begin(n), length = in.documents.length(n);
  const Real *taps = w.taps.as<Real>(), *zeros = w.zeros.as<Real>();
  const auto gather = [&](int64_t u, Real* to) {
    gather_input_gradient<W>(d, taps, range.d_linear, zeros, u, length, to);
  };
  const bool window = first == begin && has_window(grads.initial_window, n);
  const int64_t from = first - begin, to = last - begin;
  for (int64_t v = from; v < to + W - 1; ++v) {
    if (v < length) {
      const Rows<W, Real> rows(d, in, zeros, n, v);
      const Real* dy = dout.y.as<Real>() + (begin + v) * d.channels;
      Real* da = range.d_linear + v % W * row_stride(d);
      if (v < to) {
        backward_token<W, true>(d, rows, taps, dy, da, range.d_taps);
      } else {
        backward_token<W, false>(d, rows, taps, dy, da, range.d_taps);
      }
    }
    const int64_t u = v - W + 1;
    if (u >= from) {
      gather(u, grads.x.as<Real>() + (begin + u) * d.channels);
    } else if (window && u < 0) {
      gather(u, grads.initial_window.as<Real>() + (n * (W - 1) + W - 1 + u) * d.channels);
    }
  }
}

template <int W, class Real>
void run_backward(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads, const Workspace& w) {
  fill_taps<Real>(d, in, w);
  w.d_taps.zero();
  for (int64_t n = 0; has_window(grads.initial_window, n); ++n) {
    if (in.documents.length(n) == 0) grads.initial_window.at(n).zero();
  }
  const int64_t stride = row_stride(d), elements = W * stride;
  parallel_items(kPartials, [&](int64_t p) {
    const Range<Real> range{w.d_taps.as<Real>() + p * elements, w.d_linear.as<Real>() + p * elements};
    for_each_part(in.documents, d.tokens * p / kPartials, d.tokens * (p + 1) / kPartials,
                  [&](int64_t n, int64_t first, int64_t last) {
                    backward_part<W>(d, in, dout, grads, w, range, n, first, last);
                  });
  });
  Real* d_weight = grads.weight.as<Real>();
  for (int64_t p = 0; p < kPartials; ++p) {
    const Real* d_taps = w.d_taps.as<Real>() + p * elements;
    for (int64_t g = 0; g < d.channels; ++g) {
      for (int j = 0; j < W; ++j) d_weight[g * W + j] += d_taps[j * stride + g];
    }
  }
}

}  // namespace

Workspace allocate_forward(Arena& arena, const Dims& d, DType dtype) {
  return {arena.allocate(dtype, {d.width, row_stride(d)}), arena.allocate(dtype, {d.channels}), {}, {}};
}

Workspace allocate_backward(Arena& arena, const Dims& d, DType dtype) {
  Workspace w = allocate_forward(arena, d, dtype);
  w.d_taps = arena.allocate(dtype, {kPartials, d.width, row_stride(d)});
  w.d_linear = arena.allocate(dtype, {kPartials, d.width, row_stride(d)});
  return w;
}

int64_t forward_workspace(const Dims& d, DType dtype) {
  Arena arena = Arena::dry();
  allocate_forward(arena, d, dtype);
  return arena.used();
}

int64_t backward_workspace(const Dims& d, DType dtype) {
  Arena arena = Arena::dry();
  allocate_backward(arena, d, dtype);
  return arena.used();
}

void forward(const Dims& d, const Inputs& in, const Outputs& out, const Workspace& workspace) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    with_width(d.width, [&](auto width) { run_forward<width(), decltype(real)>(d, in, out, workspace); });
  });
}

void backward(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
              const Workspace& workspace) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    with_width(d.width, [&](auto width) { run_backward<width(), decltype(real)>(d, in, dout, grads, workspace); });
  });
}

}  // namespace tessera::ops::short_conv::cpu
