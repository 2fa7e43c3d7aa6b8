// KDA forward on the CPU. A unit of work is one part of the documents and one value head: it scans its chunks in order
// with the state (K, V) in its thread's cache. Per chunk, with the operands of chunk.h and the matrices of scores.h:
//
//   R = M diag(beta) (V - Kt S0)        O = Qt S0 + P R        S1 = diag(e^{G_L}) S0 + Kh^T R
//
// Kt S0 and Qt S0 are one product of stacked rows. W and U of the paper's form are not made: with the state at hand,
// M diag(beta) (V - Kt S0) needs one triangular product less.
#include <algorithm>

#include "ops/kda/cpu.h"
#include "ops/kda/scores.h"

namespace tessera::ops::kda::cpu {
namespace {

template <class Real>
struct Buffers {
  explicit Buffers(const Dims& d, Real* base) : carver(base), w(widths(d)), chunk(carver, w), scratch(carver, w) {}

  Carver<Real> carver;
  Widths w;
  Chunk<Real> chunk;
  ScoreScratch<Real> scratch;
  Matrix<Real> minus_a = carver.matrix(w.chunk, w.chunk), p = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> inverse = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> of_state = carver.matrix(2 * w.chunk, w.value);  // rows of Kt S0, then of Qt S0; becomes X, then O
  Matrix<Real> r = carver.matrix(w.chunk, w.value);
  Matrix<Real> state = carver.matrix(w.key, w.value);
};

template <class Real>
struct Unit {
  const Dims& d;
  const Outputs& out;
  Saved* saved;
  Head<Real> head;
  int64_t value_head;
  Buffers<Real>& b;

  int64_t state_at(int64_t n) const { return (n * d.value_heads + value_head) * d.value_dim * d.key_dim; }

  void chunk(int64_t token, int64_t n, int64_t index, bool state_is_zero) {
    Chunk<Real>& c = b.chunk;
    const Matrix<Real> o_out = head_rows<Real>(out.o, value_head).at(token, 0);
    load_chunk<Real>(d, head, token, n, c, nullptr);
    scores(c, b.w, b.scratch, b.minus_a, b.p);
    Matrix<Real> inverse = b.inverse;
    if (saved != nullptr) {
      const int64_t at = index * d.value_heads + value_head;
      inverse = {saved->inverse.as<Real>() + at * d.chunk * d.chunk, d.chunk};
      store_state(d, b.state, saved->states.as<Real>() + state_at(index));
    }
    invert(d.chunk, c.rows, b.minus_a, b.scratch.product, inverse);
    if (state_is_zero) {
      std::fill_n(b.of_state.data, 2 * c.rows * b.w.value, Real(0));
    } else {
      multiply(Trans::no, Write::set, 2 * c.rows, b.w.value, b.w.key, c.from_start, b.state, b.of_state);
    }
    weigh_errors(d, head, token, c, b.of_state);
    multiply_lower(Trans::no, Write::set, c.rows, b.w.value, inverse, b.of_state, b.r);
    const Matrix<Real> o = b.of_state.at(c.rows, 0);
    multiply_lower(Trans::no, Write::add, c.rows, b.w.value, b.p, b.r, o);
    for (int64_t i = 0; i < n; ++i) {
      prefetch_ahead<Access::write>(o_out, i, n, d.value_dim);
      std::copy_n(o.row(i), d.value_dim, o_out.row(i));
    }
    for (int64_t j = 0; j < b.w.key; ++j) {
      Real* s = b.state.row(j);
#pragma omp simd
      for (int64_t l = 0; l < b.w.value; ++l) s[l] *= c.decay[j];
    }
    multiply(Trans::yes, Write::add, b.w.key, b.w.value, c.rows, c.to_end, b.r, b.state);
  }

  // Returns the number of chunks.
  int64_t document(const Inputs& in, int64_t n, int64_t first_chunk) {
    const Real* initial = initial_state_of<Real>(in.initial_state, n, value_head);
    load_state(d, initial, b.state);
    const int64_t begin = in.documents.begin(n), end = in.documents.end(n);
    int64_t index = first_chunk;
    for (int64_t token = begin; token < end; token += d.chunk, ++index) {
      chunk(token, std::min(d.chunk, end - token), index, token == begin && initial == nullptr);
    }
    Real* last = final_state_of<Real>(out.final_state, in.documents, n, value_head);
    if (last != nullptr) store_state(d, b.state, last);
    return index - first_chunk;
  }
};

template <class Real>
void forward_units(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved, const View& scratch,
                   const Part* parts) {
  parallel_items(part_count(d.tokens) * d.value_heads, [&](int64_t item) {
    const int64_t p = item / d.value_heads, value_head = item % d.value_heads;
    Buffers<Real> buffers(d, scratch.as<Real>() + thread_slot() * scratch.dim(1));
    Unit<Real> unit{d, out, saved, head_of<Real>(d, in, value_head), value_head, buffers};
    int64_t chunk = parts[p].chunk;
    for (int64_t n = parts[p].document; n < parts[p + 1].document; ++n) chunk += unit.document(in, n, chunk);
  });
}

}  // namespace

int64_t forward_scratch(const Dims& d, DType dtype) {
  int64_t elements = 0;
  dispatch_real(dtype, [&](auto real) { elements = Buffers<decltype(real)>(d, nullptr).carver.used(); });
  return elements;
}

void forward(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved, const View& scratch,
             const View& parts) {
  Part* part = static_cast<Part*>(parts.data());
  find_parts(in.documents, d.tokens, d.chunk, part);
  dispatch_real(in.q.dtype(), [&](auto real) { forward_units<decltype(real)>(d, in, out, saved, scratch, part); });
}

}  // namespace tessera::ops::kda::cpu
