// KDA backward on the CPU. A unit of work is one part of the documents and one query head with its value heads in
// order; documents in order, their chunks in reverse, the gradient dS of the state in the thread's cache. The operands
// of a chunk are made again from the inputs, the saved inverse M and the saved state S0; then
//
//   dR = P^T dO + Kh dS1     Y = M^T dR     dP = tril(dO R^T)     dA = -stril(Y R^T)     dV = diag(beta) Y
//   [E; Z] = [dO; -Y] S0^T   dKh = R dS1^T  dS0 = diag(e^{G_L}) dS1 + Qt^T dO - Kt^T diag(beta) Y
//
// and the row gradients. -Y is kept instead of Y: three of its four uses have the minus sign.
//
// Gradient of the gates. attention.md 5 sums dG from the last row, where dG of row u holds -(Kh o dKh)_u and the last
// row the sum of all of them, plus e^{G_L} o rowsum(S0 o dS1). Here the two are joined before rounding: the terms of
// rows >= t cancel on paper, so dg_t gets sum_{u<t} (Kh o dKh)_u + e^{G_L} o rowsum(S0 o dS1) instead. S1 is not
// needed.
#include <algorithm>

#include "ops/kda/cpu.h"
#include "ops/kda/gate.h"
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
  GateSlopes<Real> slopes{carver.matrix(w.chunk, w.key), carver.matrix(w.chunk, w.key)};
  Matrix<Real> p = carver.matrix(w.chunk, w.chunk), dp = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> da = carver.matrix(w.chunk, w.chunk);
  Matrix<Real> x = carver.matrix(w.chunk, w.value);  // X, then dR, then -diag(beta) Y
  Matrix<Real> r = carver.matrix(w.chunk, w.value), r_t = carver.matrix(w.value, w.chunk);
  Matrix<Real> d_o_y = carver.matrix(2 * w.chunk, w.value);  // rows of dO, then of -Y
  Matrix<Real> e_z = carver.matrix(2 * w.chunk, w.key);      // rows of E, then of Z
  Matrix<Real> d_to_end = carver.matrix(w.chunk, w.key);     // dKh
  ScoreGrads<Real> by{carver.matrix(w.chunk, w.key), carver.matrix(w.chunk, w.key), carver.matrix(w.chunk, w.key)};
  Matrix<Real> state = carver.matrix(w.key, w.value), state_t = carver.matrix(w.value, w.key);
  Matrix<Real> d_state = carver.matrix(w.key, w.value), d_state_t = carver.matrix(w.value, w.key);
  Real *d_beta = carver.take(w.chunk), *flow = carver.take(w.key);
  Real *sum_x = carver.take(w.key), *sum_a_log = carver.take(w.key);
};

template <class Real>
struct HeadGrads {
  Matrix<Real> o, q, k, v, z, beta_logit;  // o is given
  Real *dt_bias, *a_log;                   // (K) each: the sums of this part
  bool add_qk;                             // not the first value head of its query head
};

// Where a chunk lies, and which of its states are known to be 0 or not wanted.
struct Place {
  int64_t token, n, index;
  bool state_is_zero, d_state_is_zero, d_initial_wanted;
};

template <class Real>
struct Unit {
  const Dims& d;
  const Saved& saved;
  Head<Real> head;
  HeadGrads<Real> grads;
  int64_t value_head;
  Buffers<Real>& b;

  int64_t state_at(int64_t n) const { return (n * d.value_heads + value_head) * d.value_dim * d.key_dim; }
  Matrix<Real> inverse(int64_t index) const {
    return {saved.inverse.as<Real>() + (index * d.value_heads + value_head) * d.chunk * d.chunk, d.chunk};
  }
  Matrix<Real> d_o() const { return b.d_o_y; }
  Matrix<Real> minus_y() const { return b.d_o_y.at(b.chunk.rows, 0); }

  // R, from the saved inverse and state.
  void solve_forward(const Place& at) {
    Chunk<Real>& c = b.chunk;
    if (at.state_is_zero) {
      std::fill_n(b.x.data, c.rows * b.w.value, Real(0));
    } else {
      load_state(d, saved.states.as<Real>() + state_at(at.index), b.state);
      multiply(Trans::no, Write::set, c.rows, b.w.value, b.w.key, c.k_from_start(), b.state, b.x);
    }
    weigh_errors(d, head, at.token, c, b.x);
    multiply_lower(Trans::no, Write::set, c.rows, b.w.value, inverse(at.index), b.x, b.r);
  }

  // -Y and what follows from it row by row: dV, -diag(beta) Y, the part of dbeta that comes from V.
  void solve_values(const Place& at) {
    Chunk<Real>& c = b.chunk;
    load_rows(grads.o.at(at.token, 0), c.n, d.value_dim, Real(1), d_o(), c.rows, b.w.value);
    multiply_lower(Trans::yes, Write::set, c.rows, b.w.value, b.p, d_o(), b.x);
    if (!at.d_state_is_zero) {
      multiply(Trans::no, Write::add, c.rows, b.w.value, b.w.key, c.to_end, b.d_state, b.x);
    }
    multiply_lower(Trans::yes, Write::set, c.rows, b.w.value, inverse(at.index), b.x, minus_y());
    for (int64_t i = 0; i < c.rows; ++i) {
      Real *y = minus_y().row(i), *beta_y = b.x.row(i);
#pragma omp simd
      for (int64_t j = 0; j < b.w.value; ++j) {
        y[j] = -y[j];
        beta_y[j] = c.beta[i] * y[j];
      }
      if (i >= c.n) continue;
      prefetch_ahead(head.v.at(at.token, 0), i, c.n, d.value_dim);
      prefetch_ahead<Access::write>(grads.v.at(at.token, 0), i, c.n, d.value_dim);
      const Real* v = head.v.row(at.token + i);
      Real *dv = grads.v.row(at.token + i), dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < d.value_dim; ++j) {
        dv[j] = -beta_y[j];
        dot -= y[j] * v[j];
      }
      b.d_beta[i] = dot;
    }
  }

  void scores_and_states(const Place& at) {
    Chunk<Real>& c = b.chunk;
    const Widths& w = b.w;
    transpose(c.rows, w.value, b.r, b.r_t);
    for (int64_t t = 0; t < c.rows; t += kTile) {
      multiply(Trans::no, Write::set, kTile, t + kTile, w.value, d_o().at(t, 0), b.r_t, b.dp.at(t, 0));
      multiply(Trans::no, Write::set, kTile, t + kTile, w.value, minus_y().at(t, 0), b.r_t, b.da.at(t, 0));
    }
    if (at.state_is_zero) {
      std::fill_n(b.e_z.data, 2 * c.rows * w.key, Real(0));
    } else {
      Matrix<Real> v_first{saved.states.as<Real>() + state_at(at.index), d.key_dim};
      if (w.key != d.key_dim) {
        transpose(w.key, w.value, b.state, b.state_t);
        v_first = b.state_t;
      }
      multiply(Trans::no, Write::set, 2 * c.rows, w.key, d.value_dim, b.d_o_y, v_first, b.e_z);
    }
    if (at.d_state_is_zero) {
      std::fill_n(b.d_to_end.data, c.rows * w.key, Real(0));
    } else {
      transpose(w.key, w.value, b.d_state, b.d_state_t);
      multiply(Trans::no, Write::set, c.rows, w.key, w.value, b.r, b.d_state_t, b.d_to_end);
    }
    for (int64_t j = 0; j < w.key; ++j) {
      const Real* s = b.state.row(j);
      Real *ds = b.d_state.row(j), dot = 0;
      if (!at.state_is_zero && !at.d_state_is_zero) {
#pragma omp simd reduction(+ : dot)
        for (int64_t l = 0; l < w.value; ++l) dot += s[l] * ds[l];
      }
      b.flow[j] = c.decay[j] * dot;
#pragma omp simd
      for (int64_t l = 0; l < w.value; ++l) ds[l] *= c.decay[j];
    }
    if (at.state_is_zero && !at.d_initial_wanted) return;
    multiply(Trans::yes, Write::add, w.key, w.value, c.rows, c.q_from_start(), d_o(), b.d_state);
    multiply(Trans::yes, Write::add, w.key, w.value, c.rows, c.k_from_start(), b.x, b.d_state);
  }

  // Adds the parts of the rows that go through the states; leaves dq (scale aside) in by_q, dk but for its dKh term in
  // by_k_row, the terms of dg that are summed from the end in by_k_column, those summed from the start in E's rows.
  void rows_forward(int64_t token) {
    Chunk<Real>& c = b.chunk;
    Real *decay = c.running, *flow = b.flow;
    std::fill_n(decay, b.w.key, Real(1));
    for (int64_t i = 0; i < c.n; ++i) {
      const Real *alpha = c.alpha.row(i), *q = c.q.row(i), *k = c.k.row(i), *z = b.e_z.row(c.rows + i);
      const Real *to_end = c.to_end.row(i), *d_to_end = b.d_to_end.row(i);
      Real *e = b.e_z.row(i), *dq = b.by.by_q.row(i), *dk = b.by.by_k_row.row(i), *column = b.by.by_k_column.row(i);
      const Real beta = c.beta[i], diagonal = b.dp.row(i)[i];
      Real dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < b.w.key; ++j) {
        decay[j] *= alpha[j];
        dq[j] += decay[j] * e[j];
        const Real row = dk[j] + decay[j] * z[j];
        dot += k[j] * row;
        e[j] = flow[j];
        flow[j] += to_end[j] * d_to_end[j];
        dk[j] = beta * row + column[j] + diagonal * q[j];
        column[j] = q[j] * dq[j] + k[j] * (beta * row - column[j]);
        dq[j] += diagonal * k[j];
      }
      const Real logit = head.beta_logit.row(token + i)[0];
      grads.beta_logit.row(token + i)[0] = (b.d_beta[i] + dot) * beta * fast::sigmoid(-logit);
    }
  }

  void rows_backward(int64_t token) {
    Chunk<Real>& c = b.chunk;
    Real *decay = c.running, *later = b.flow;
    std::fill_n(decay, b.w.key, Real(1));
    for (Real* sum : {later, b.sum_x, b.sum_a_log}) std::fill_n(sum, b.w.key, Real(0));
    const Real scale = Real(query_scale(d));
    for (int64_t i = c.n - 1; i >= 0; --i) {
      for (const Matrix<Real>& out : {grads.q, grads.k, grads.z}) {
        prefetch_ahead<Access::write>(Matrix<Real>{out.row(token + c.n - 1), -out.stride}, c.n - 1 - i, c.n, d.key_dim);
      }
      const Real *alpha = c.alpha.row(i), *d_to_end = b.d_to_end.row(i), *earlier = b.e_z.row(i);
      const Real *by_x = b.slopes.by_x.row(i), *by_a_log = b.slopes.by_a_log.row(i);
      const Real *by_q = b.by.by_q.row(i), *column = b.by.by_k_column.row(i);
      Real *dk = b.by.by_k_row.row(i), *dz = grads.z.row(token + i);
      Real *dq_out = grads.q.row(token + i), *dk_out = grads.k.row(token + i);
#pragma omp simd
      for (int64_t j = 0; j < d.key_dim; ++j) {
        dk[j] += decay[j] * d_to_end[j];
        decay[j] *= alpha[j];
        later[j] += column[j];
        // Nothing passes a decay of 0. The sum would leave its rounding error, which a steep gate multiplies.
        const Real dg = alpha[j] == 0 ? Real(0) : later[j] + earlier[j];
        dz[j] = by_x[j] * dg;
        b.sum_x[j] += dz[j];
        b.sum_a_log[j] += by_a_log[j] * dg;
      }
      if (grads.add_qk) {
#pragma omp simd
        for (int64_t j = 0; j < d.key_dim; ++j) {
          dq_out[j] += scale * by_q[j];
          dk_out[j] += dk[j];
        }
      } else {
#pragma omp simd
        for (int64_t j = 0; j < d.key_dim; ++j) {
          dq_out[j] = scale * by_q[j];
          dk_out[j] = dk[j];
        }
      }
    }
    for (int64_t j = 0; j < d.key_dim; ++j) {
      grads.dt_bias[j] += b.sum_x[j];
      grads.a_log[j] += b.sum_a_log[j];
    }
  }

  void chunk(const Place& at) {
    load_chunk(d, head, at.token, at.n, b.chunk, &b.slopes);
    scores(b.chunk, b.w, b.scratch, Matrix<Real>{}, b.p);
    solve_forward(at);
    solve_values(at);
    scores_and_states(at);
    scores_backward(b.chunk, b.w, b.scratch, b.da, b.dp, b.by);
    rows_forward(at.token);
    rows_backward(at.token);
  }

  // Returns the number of chunks.
  int64_t document(const Inputs& in, const View& d_final, const View& d_initial, int64_t n, int64_t first_chunk) {
    const Real* d_last = final_state_of<Real>(d_final, in.documents, n, value_head);
    Real* d_first = initial_state_of<Real>(d_initial, n, value_head);
    const bool from_zero = initial_state_of<Real>(in.initial_state, n, value_head) == nullptr;
    load_state(d, d_last, b.d_state);
    const int64_t begin = in.documents.begin(n), length = in.documents.length(n);
    const int64_t chunks = (length + d.chunk - 1) / d.chunk;
    for (int64_t i = chunks - 1; i >= 0; --i) {
      chunk({.token = begin + i * d.chunk,
             .n = std::min(d.chunk, length - i * d.chunk),
             .index = first_chunk + i,
             .state_is_zero = i == 0 && from_zero,
             .d_state_is_zero = i == chunks - 1 && d_last == nullptr,
             .d_initial_wanted = d_first != nullptr});
    }
    if (d_first != nullptr) store_state(d, b.d_state, d_first);
    return chunks;
  }
};

template <class Real>
void backward_units(const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout, const Grads& grads,
                    const View& scratch, const View& partials, const Part* parts) {
  const int64_t group = d.value_heads / d.heads, width = widths(d).key;
  parallel_items(part_count(d.tokens) * d.heads, [&](int64_t item) {
    const int64_t p = item / d.heads, query_head = item % d.heads;
    Buffers<Real> buffers(d, scratch.as<Real>() + thread_slot() * scratch.dim(1));
    for (int64_t h = query_head * group; h < (query_head + 1) * group; ++h) {
      Real* sums = partials.as<Real>() + (p * d.value_heads + h) * partial_width(d);
      std::fill_n(sums, partial_width(d), Real(0));
      const HeadGrads<Real> to{head_rows<Real>(dout.o, h),
                               head_rows<Real>(grads.q, query_head),
                               head_rows<Real>(grads.k, query_head),
                               head_rows<Real>(grads.v, h),
                               head_rows<Real>(grads.z, h),
                               head_rows<Real>(grads.beta_logit, h),
                               sums,
                               sums + width,
                               h != query_head * group};
      Unit<Real> unit{d, saved, head_of<Real>(d, in, h), to, h, buffers};
      int64_t chunk = parts[p].chunk;
      for (int64_t n = parts[p].document; n < parts[p + 1].document; ++n) {
        chunk += unit.document(in, dout.final_state, grads.initial_state, n, chunk);
      }
    }
  });
}

// dt_bias and A_log gradients: the sums of the parts in order.
template <class Real>
void add_partials(const Dims& d, const Grads& grads, const View& partials) {
  const int64_t width = widths(d).key;
  for (int64_t p = 0; p < part_count(d.tokens); ++p) {
    for (int64_t h = 0; h < d.value_heads; ++h) {
      const Real* sums = partials.as<Real>() + (p * d.value_heads + h) * partial_width(d);
      Real* dt_bias = grads.dt_bias.as<Real>() + h * d.key_dim;
      Real a_log = 0;
      for (int64_t j = 0; j < d.key_dim; ++j) {
        dt_bias[j] += sums[j];
        a_log += sums[width + j];
      }
      if (grads.a_log.present()) grads.a_log.as<Real>()[h] += a_log;
    }
  }
}

}  // namespace

int64_t partial_width(const Dims& d) { return 2 * widths(d).key; }

int64_t backward_scratch(const Dims& d, DType dtype) {
  int64_t elements = 0;
  dispatch_real(dtype, [&](auto real) { elements = Buffers<decltype(real)>(d, nullptr).carver.used(); });
  return elements;
}

void backward(const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout, const Grads& grads,
              const View& scratch, const View& partials, const View& parts) {
  Part* part = static_cast<Part*>(parts.data());
  find_parts(in.documents, d.tokens, d.chunk, part);
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    backward_units<Real>(d, in, saved, dout, grads, scratch, partials, part);
    add_partials<Real>(d, grads, partials);
  });
}

}  // namespace tessera::ops::kda::cpu
