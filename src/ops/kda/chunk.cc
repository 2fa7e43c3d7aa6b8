#include "ops/kda/chunk.h"

#include <algorithm>

#include "ops/kda/gate.h"

namespace tessera::ops::kda::cpu {
namespace {

template <Gate kGate, class Real>
void load_gates(const Dims& d, const Head<Real>& h, int64_t token, Chunk<Real>& c, GateSlopes<Real>* slopes) {
  const Real bound = Real(d.lower_bound), a = h.a;
  Real* sum = c.decay;
  for (int64_t i = 0; i < c.n; ++i) {
    prefetch_ahead(h.z.at(token, 0), i, c.n, d.key_dim);
    const Real* z = h.z.row(token + i);
    Real* alpha = c.alpha.row(i);
    Real* by_x = slopes == nullptr ? nullptr : slopes->by_x.row(i);
    Real* by_a_log = slopes == nullptr ? nullptr : slopes->by_a_log.row(i);
    const auto each = [&](int64_t j) __attribute__((always_inline)) {
      const GateValue<Real> value = gate<kGate>(z[j] + h.dt_bias[j], a, bound);
      sum[j] += value.g;
      alpha[j] = fast::exp(value.g);
      return value;
    };
    if (slopes == nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < d.key_dim; ++j) each(j);
    } else {
#pragma omp simd
      for (int64_t j = 0; j < d.key_dim; ++j) {
        const GateValue<Real> value = each(j);
        by_x[j] = value.by_x;
        by_a_log[j] = value.by_a_log;
      }
    }
  }
}

template <class Real>
void decay_operands(int64_t width, Chunk<Real>& c) {
  Real* p = c.running;
  std::fill_n(p, width, Real(1));
  const Matrix<Real> k_start = c.k_from_start(), q_start = c.q_from_start();
  for (int64_t i = 0; i < c.rows; ++i) {
    const Real *k = c.k.row(i), *q = c.q.row(i), *alpha = c.alpha.row(i);
    Real *ks = k_start.row(i), *qs = q_start.row(i);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      p[j] *= alpha[j];
      ks[j] = k[j] * p[j];
      qs[j] = q[j] * p[j];
    }
  }
  std::fill_n(p, width, Real(1));
  for (int64_t i = c.rows - 1; i >= 0; --i) {
    const Real *k = c.k.row(i), *alpha = c.alpha.row(i);
    Real* ke = c.to_end.row(i);
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      ke[j] = k[j] * p[j];
      p[j] *= alpha[j];
    }
  }
}

// Rows of M = I - A M, each from the rows above it: errors of one rounding a term, no powers of A.
template <class Real>
void invert_tile(Matrix<Real> minus_a, Matrix<Real> inverse) {
  for (int64_t i = 0; i < kTile; ++i) {
    Real row[kTile] = {};
    row[i] = 1;
    for (int64_t j = 0; j < i; ++j) {
      const Real a = minus_a.row(i)[j];
      const Real* above = inverse.row(j);
#pragma omp simd
      for (int64_t l = 0; l < kTile; ++l) row[l] += a * above[l];
    }
    std::copy_n(row, kTile, inverse.row(i));
  }
}

}  // namespace

template <class Real>
Chunk<Real>::Chunk(Carver<Real>& carver, const Widths& w)
    : q(carver.matrix(w.chunk, w.key)),
      k(carver.matrix(w.chunk, w.key)),
      alpha(carver.matrix(w.chunk, w.key)),
      beta(carver.take(w.chunk)),
      decay(carver.take(w.key)),
      from_start(carver.matrix(2 * w.chunk, w.key)),
      to_end(carver.matrix(w.chunk, w.key)),
      running(carver.take(w.key)) {}

template <class Real>
Head<Real> head_of(const Dims& d, const Inputs& in, int64_t value_head) {
  const int64_t head = value_head / (d.value_heads / d.heads);
  return {head_rows<Real>(in.q, head),
          head_rows<Real>(in.k, head),
          head_rows<Real>(in.v, value_head),
          head_rows<Real>(in.z, value_head),
          head_rows<Real>(in.beta_logit, value_head),
          in.dt_bias.as<Real>() + value_head * d.key_dim,
          gate_rate<Real>(in.a_log.present() ? in.a_log.as<Real>() : nullptr, value_head)};
}

template <class Real>
void load_rows(Matrix<Real> from, int64_t n, int64_t d, Real factor, Matrix<Real> to, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < n; ++i) {
    prefetch_ahead(from, i, n, d);
    const Real* source = from.row(i);
    Real* target = to.row(i);
#pragma omp simd
    for (int64_t j = 0; j < d; ++j) target[j] = factor * source[j];
    std::fill(target + d, target + width, Real(0));
  }
  for (int64_t i = n; i < rows; ++i) std::fill_n(to.row(i), width, Real(0));
}

template <class Real>
void load_chunk(const Dims& d, const Head<Real>& h, int64_t token, int64_t n, Chunk<Real>& c,
                GateSlopes<Real>* slopes) {
  const int64_t width = widths(d).key;
  c.n = n;
  c.rows = padded(n);
  load_rows(h.q.at(token, 0), n, d.key_dim, Real(query_scale(d)), c.q, c.rows, width);
  load_rows(h.k.at(token, 0), n, d.key_dim, Real(1), c.k, c.rows, width);
  for (int64_t i = 0; i < c.rows; ++i) {
    c.beta[i] = i < n ? beta_of(h.beta_logit.row(token + i)[0], d.negative_eigenvalues) : Real(0);
    Real* alpha = c.alpha.row(i);
    std::fill(alpha + (i < n ? d.key_dim : 0), alpha + width, Real(1));
  }
  std::fill_n(c.decay, width, Real(0));
  if (d.gate == Gate::bounded) {
    load_gates<Gate::bounded>(d, h, token, c, slopes);
  } else {
    load_gates<Gate::unbounded>(d, h, token, c, slopes);
  }
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) c.decay[j] = fast::exp(c.decay[j]);
  decay_operands(width, c);
}

template <class Real>
void weigh_errors(const Dims& d, const Head<Real>& h, int64_t token, const Chunk<Real>& c, Matrix<Real> x) {
  const int64_t width = widths(d).value;
  for (int64_t i = 0; i < c.n; ++i) {
    prefetch_ahead(h.v.at(token, 0), i, c.n, d.value_dim);
    const Real *v = h.v.row(token + i), beta = c.beta[i];
    Real* x_i = x.row(i);
#pragma omp simd
    for (int64_t j = 0; j < d.value_dim; ++j) x_i[j] = beta * (v[j] - x_i[j]);
    std::fill(x_i + d.value_dim, x_i + width, Real(0));
  }
  for (int64_t i = c.n; i < c.rows; ++i) std::fill_n(x.row(i), width, Real(0));
}

template <class Real>
void invert(int64_t chunk, int64_t rows, Matrix<Real> minus_a, Matrix<Real> scratch, Matrix<Real> inverse) {
  for (int64_t i = 0; i < chunk; ++i) {
    std::fill_n(inverse.row(i), chunk, Real(0));
    if (i >= rows) inverse.row(i)[i] = 1;
  }
  for (int64_t t = 0; t < rows; t += kTile) invert_tile(minus_a.at(t, t), inverse.at(t, t));
  for (int64_t half = kTile; half < rows; half *= 2) {
    for (int64_t base = half; base < rows; base += 2 * half) {
      const int64_t low = base - half, count = std::min(half, rows - base);
      multiply(Trans::no, Write::set, count, half, half, minus_a.at(base, low), inverse.at(low, low), scratch);
      multiply(Trans::no, Write::set, count, half, count, inverse.at(base, base), scratch, inverse.at(base, low));
    }
  }
}

template <class Real>
void multiply_lower(Trans trans, Write write, int64_t rows, int64_t n, Matrix<Real> lower, Matrix<Real> b,
                    Matrix<Real> c) {
  for (int64_t t = 0; t < rows; t += kTile) {
    if (trans == Trans::no) {
      multiply(trans, write, kTile, n, t + kTile, lower.at(t, 0), b, c.at(t, 0));
    } else {
      multiply(trans, write, kTile, n, rows - t, lower.at(t, t), b.at(t, 0), c.at(t, 0));
    }
  }
}

template <class Real>
void load_state(const Dims& d, const Real* v_first, Matrix<Real> k_first) {
  const Widths w = widths(d);
  if (v_first != nullptr && w.key == d.key_dim && w.value == d.value_dim) {
    return transpose(d.value_dim, d.key_dim, {const_cast<Real*>(v_first), d.key_dim}, k_first);
  }
  std::fill_n(k_first.data, w.key * w.value, Real(0));
  if (v_first == nullptr) return;
  for (int64_t v = 0; v < d.value_dim; ++v) {
    for (int64_t c = 0; c < d.key_dim; ++c) k_first.row(c)[v] = v_first[v * d.key_dim + c];
  }
}

template <class Real>
void store_state(const Dims& d, Matrix<Real> k_first, Real* v_first) {
  const Widths w = widths(d);
  if (w.key == d.key_dim && w.value == d.value_dim) {
    return transpose(d.key_dim, d.value_dim, k_first, {v_first, d.key_dim});
  }
  for (int64_t v = 0; v < d.value_dim; ++v) {
    for (int64_t c = 0; c < d.key_dim; ++c) v_first[v * d.key_dim + c] = k_first.row(c)[v];
  }
}

#define TESSERA_KDA_CHUNK(Real)                                                                                \
  template struct Chunk<Real>;                                                                                 \
  template Head<Real> head_of(const Dims&, const Inputs&, int64_t);                                            \
  template void load_rows(Matrix<Real>, int64_t, int64_t, Real, Matrix<Real>, int64_t, int64_t);               \
  template void load_chunk(const Dims&, const Head<Real>&, int64_t, int64_t, Chunk<Real>&, GateSlopes<Real>*); \
  template void weigh_errors(const Dims&, const Head<Real>&, int64_t, const Chunk<Real>&, Matrix<Real>);       \
  template void invert(int64_t, int64_t, Matrix<Real>, Matrix<Real>, Matrix<Real>);                            \
  template void multiply_lower(Trans, Write, int64_t, int64_t, Matrix<Real>, Matrix<Real>, Matrix<Real>);      \
  template void load_state(const Dims&, const Real*, Matrix<Real>);                                            \
  template void store_state(const Dims&, Matrix<Real>, Real*);
TESSERA_KDA_CHUNK(float)
TESSERA_KDA_CHUNK(double)
#undef TESSERA_KDA_CHUNK

}  // namespace tessera::ops::kda::cpu
