// KDA decode on the CPU: the token recurrence, one sequence and value head at a time, the state in place. A row of the
// V-first state is one value channel, so that both products with the state are dot products along the row and one
// pass over the state does everything: memory bound.
#include "ops/kda/chunk.h"
#include "ops/kda/cpu.h"
#include "ops/kda/gate.h"

namespace tessera::ops::kda::cpu {
namespace {

template <class Real>
void decay_of(const Dims& d, const Head<Real>& h, int64_t token, Real* alpha) {
  const Real *z = h.z.row(token), a = h.a, bound = Real(d.lower_bound);
  if (d.gate == Gate::bounded) {
#pragma omp simd
    for (int64_t j = 0; j < d.key_dim; ++j) alpha[j] = fast::exp(gate<Gate::bounded>(z[j] + h.dt_bias[j], a, bound).g);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < d.key_dim; ++j) {
      alpha[j] = fast::exp(gate<Gate::unbounded>(z[j] + h.dt_bias[j], a, bound).g);
    }
  }
}

template <class Real>
void step_head(const Dims& d, const Head<Real>& h, int64_t token, const Real* alpha, Real* state, Real* o) {
  const Real *q = h.q.row(token), *k = h.k.row(token), *v = h.v.row(token);
  const Real scale = Real(query_scale(d));
  const Real beta = beta_of(h.beta_logit.row(token)[0], d.negative_eigenvalues);
  for (int64_t i = 0; i < d.value_dim; ++i) {
    Real* s = state + i * d.key_dim;
    Real predicted = 0, out = 0;
#pragma omp simd reduction(+ : predicted)
    for (int64_t j = 0; j < d.key_dim; ++j) {
      s[j] *= alpha[j];
      predicted += s[j] * k[j];
    }
    const Real r = beta * (v[i] - predicted);
#pragma omp simd reduction(+ : out)
    for (int64_t j = 0; j < d.key_dim; ++j) {
      s[j] += r * k[j];
      out += s[j] * q[j];
    }
    o[i] = scale * out;
  }
}

constexpr int64_t kGrainElements = 1 << 14;  // of the state; below this a thread costs more than it saves

}  // namespace

int64_t step_scratch(const Dims& d) { return padded(d.key_dim); }

void step(const Dims& d, const Inputs& in, const View& state, const View& o, const View& scratch) {
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    const int64_t size = d.value_dim * d.key_dim;
    const int64_t grain = std::max<int64_t>(1, kGrainElements / size);
    parallel_ranges(d.tokens * d.value_heads, grain, [&](int64_t begin, int64_t end) {
      Real* alpha = scratch.as<Real>() + thread_slot() * scratch.dim(1);
      for (int64_t item = begin; item < end; ++item) {
        const int64_t token = item / d.value_heads, value_head = item % d.value_heads;
        const Head<Real> head = head_of<Real>(d, in, value_head);
        decay_of(d, head, token, alpha);
        step_head(d, head, token, alpha, state.as<Real>() + item * size, head_rows<Real>(o, value_head).row(token));
      }
    });
  });
}

}  // namespace tessera::ops::kda::cpu
