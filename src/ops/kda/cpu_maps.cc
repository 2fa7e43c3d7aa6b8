// Maps of states on the CPU: the scans of forward and backward without their outputs, one value head a unit of work.
//
//   forward    [X T^T]: a state of V + K columns, begun from [0 I], which the values reach in the first V alone
//   backward   dX: dR = P^T dO + Kh dS1,  Y = M^T dR,  dS0 = diag(e^{G_L}) dS1 + Qt^T dO - Kt^T diag(beta) Y
//
// The operands of a chunk are made once for all columns; M of the backward is the saved one.
#include <algorithm>

#include "ops/kda/cpu.h"
#include "ops/kda/scores.h"

namespace tessera::ops::kda::cpu {
namespace {

// A head of K values: the transition seen as a state, V-first.
Dims square(Dims d) {
  d.value_dim = d.key_dim;
  return d;
}

template <class Real>
void decay_state(const Chunk<Real>& c, int64_t rows, int64_t columns, Matrix<Real> state) {
  for (int64_t j = 0; j < rows; ++j) {
    Real* s = state.row(j);
#pragma omp simd
    for (int64_t l = 0; l < columns; ++l) s[l] *= c.decay[j];
  }
}

template <class Real>
struct MapBuffers {
  MapBuffers(const Dims& d, bool transition, Real* base)
      : carver(base), w(widths(d)), columns(w.value + (transition ? w.key : 0)), chunk(carver, w), scratch(carver, w) {}

  Carver<Real> carver;
  Widths w;
  int64_t columns;
  Chunk<Real> chunk;
  ScoreScratch<Real> scratch;
  Matrix<Real> minus_a = carver.matrix(w.chunk, w.chunk), p = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> inverse = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> x = carver.matrix(w.chunk, columns), r = carver.matrix(w.chunk, columns);
  Matrix<Real> state = carver.matrix(w.key, columns);
};

template <class Real>
void map_chunk(const Dims& d, const Head<Real>& head, int64_t token, int64_t n, MapBuffers<Real>& b) {
  Chunk<Real>& c = b.chunk;
  load_chunk<Real>(d, head, token, n, c, nullptr);
  scores(c, b.w, b.scratch, b.minus_a, b.p);
  invert(d.chunk, c.rows, b.minus_a, b.scratch.product, b.inverse);
  multiply(Trans::no, Write::set, c.rows, b.columns, b.w.key, c.k_from_start(), b.state, b.x);
  weigh_errors(d, head, token, c, b.x);
  for (int64_t i = 0; i < c.rows; ++i) {
    Real* x = b.x.row(i);
#pragma omp simd
    for (int64_t j = b.w.value; j < b.columns; ++j) x[j] *= -c.beta[i];
  }
  multiply_lower(Trans::no, Write::set, c.rows, b.columns, b.inverse, b.x, b.r);
  decay_state(c, b.w.key, b.columns, b.state);
  multiply(Trans::yes, Write::add, b.w.key, b.columns, c.rows, c.to_end, b.r, b.state);
}

template <class Real>
void map_head(const Dims& d, const Inputs& in, int64_t document, const StateMap& map, int64_t value_head,
              MapBuffers<Real> b) {
  const Head<Real> head = head_of<Real>(d, in, value_head);
  std::fill_n(b.state.data, b.w.key * b.columns, Real(0));
  for (int64_t j = b.w.value; j < b.columns; ++j) b.state.row(j - b.w.value)[j] = 1;
  const int64_t end = in.documents.end(document);
  for (int64_t token = in.documents.begin(document); token < end; token += d.chunk) {
    map_chunk(d, head, token, std::min(d.chunk, end - token), b);
  }
  store_state(d, b.state, map.offset.as<Real>() + value_head * d.value_dim * d.key_dim);
  if (!map.transition.present()) return;
  store_state(square(d), b.state.at(0, b.w.value), map.transition.as<Real>() + value_head * d.key_dim * d.key_dim);
}

template <class Real>
struct GradientMapBuffers {
  GradientMapBuffers(const Dims& d, Real* base) : carver(base), w(widths(d)), chunk(carver, w), scratch(carver, w) {}

  Carver<Real> carver;
  Widths w;
  Chunk<Real> chunk;
  ScoreScratch<Real> scratch;
  Matrix<Real> p = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> d_o = carver.matrix(w.chunk, w.value), x = carver.matrix(w.chunk, w.value);  // dR, then diag(beta) Y
  Matrix<Real> y = carver.matrix(w.chunk, w.value);
  Matrix<Real> d_state = carver.matrix(w.key, w.value);
};

template <class Real>
void gradient_map_chunk(const Dims& d, const Head<Real>& head, Matrix<Real> d_o, Matrix<Real> inverse, int64_t token,
                        int64_t n, GradientMapBuffers<Real>& b) {
  Chunk<Real>& c = b.chunk;
  const Widths& w = b.w;
  load_chunk<Real>(d, head, token, n, c, nullptr);
  scores(c, w, b.scratch, Matrix<Real>{}, b.p);
  load_rows(d_o.at(token, 0), n, d.value_dim, Real(1), b.d_o, c.rows, w.value);
  multiply_lower(Trans::yes, Write::set, c.rows, w.value, b.p, b.d_o, b.x);
  multiply(Trans::no, Write::add, c.rows, w.value, w.key, c.to_end, b.d_state, b.x);
  multiply_lower(Trans::yes, Write::set, c.rows, w.value, inverse, b.x, b.y);
  for (int64_t i = 0; i < c.rows; ++i) {
    Real* y = b.y.row(i);
#pragma omp simd
    for (int64_t j = 0; j < w.value; ++j) y[j] *= -c.beta[i];
  }
  decay_state(c, w.key, w.value, b.d_state);
  multiply(Trans::yes, Write::add, w.key, w.value, c.rows, c.q_from_start(), b.d_o, b.d_state);
  multiply(Trans::yes, Write::add, w.key, w.value, c.rows, c.k_from_start(), b.y, b.d_state);
}

template <class Real>
void gradient_map_head(const Dims& d, const Inputs& in, const Saved& saved, const View& d_o, int64_t document,
                       const View& offset, int64_t value_head, GradientMapBuffers<Real> b) {
  const Head<Real> head = head_of<Real>(d, in, value_head);
  const int64_t begin = in.documents.begin(document), length = in.documents.length(document);
  const Documents before{in.documents.offsets.first(static_cast<size_t>(document) + 1)};
  const int64_t first_chunk = chunk_count(before, d.chunk), chunks = (length + d.chunk - 1) / d.chunk;
  std::fill_n(b.d_state.data, b.w.key * b.w.value, Real(0));
  for (int64_t i = chunks - 1; i >= 0; --i) {
    const int64_t of_chunk = (first_chunk + i) * d.value_heads + value_head;
    const Matrix<Real> inverse{saved.inverse.as<Real>() + of_chunk * d.chunk * d.chunk, d.chunk};
    gradient_map_chunk(d, head, head_rows<Real>(d_o, value_head), inverse, begin + i * d.chunk,
                       std::min(d.chunk, length - i * d.chunk), b);
  }
  store_state(d, b.d_state, offset.as<Real>() + value_head * d.value_dim * d.key_dim);
}

template <class Real>
void fold_rows(const StateMap& map, Pass pass, const View& state, const View& row) {
  const int64_t values = state.dim(1), width = state.dim(2);
  parallel_items(state.dim(0) * values, [&](int64_t item) {
    const Real* t = map.transition.as<Real>() + item / values * width * width;
    Real *s = state.as<Real>() + item * width, *sum = row.as<Real>() + thread_slot() * width;
    std::copy_n(map.offset.as<Real>() + item * width, width, sum);
    for (int64_t r = 0; r < width; ++r) {
      if (pass == Pass::forward) {
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) sum[c] += s[r] * t[r * width + c];
      } else {
        Real dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t c = 0; c < width; ++c) dot += s[c] * t[r * width + c];
        sum[r] += dot;
      }
    }
    std::copy_n(sum, width, s);
  });
}

}  // namespace

int64_t map_scratch(const Dims& d, Pass pass, bool transition, DType dtype) {
  int64_t elements = 0;
  dispatch_real(dtype, [&](auto real) {
    using Real = decltype(real);
    elements = pass == Pass::forward ? MapBuffers<Real>(d, transition, nullptr).carver.used()
                                     : GradientMapBuffers<Real>(d, nullptr).carver.used();
  });
  return elements;
}

void state_map(const Dims& d, const Inputs& in, int64_t document, const StateMap& map, const View& scratch) {
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    parallel_items(d.value_heads, [&](int64_t h) {
      Real* own = scratch.as<Real>() + thread_slot() * scratch.dim(1);
      map_head<Real>(d, in, document, map, h, MapBuffers<Real>(d, map.transition.present(), own));
    });
  });
}

void state_gradient_map(const Dims& d, const Inputs& in, const Saved& saved, const View& d_o, int64_t document,
                        const View& offset, const View& scratch) {
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    parallel_items(d.value_heads, [&](int64_t h) {
      Real* own = scratch.as<Real>() + thread_slot() * scratch.dim(1);
      gradient_map_head<Real>(d, in, saved, d_o, document, offset, h, GradientMapBuffers<Real>(d, own));
    });
  });
}

void fold(const StateMap& map, Pass pass, const View& state, const View& row) {
  dispatch_real(state.dtype(), [&](auto real) { fold_rows<decltype(real)>(map, pass, state, row); });
}

}  // namespace tessera::ops::kda::cpu
