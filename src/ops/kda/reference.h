// KDA by definition: the token recurrence (attention.md 3.1) and its backward (4.2), in float64, one value head of one
// document at a time. No chunks, no anchors, no parallelism.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/kda/op.h"

namespace tessera::ops::kda::reference {

using Values = std::vector<double>;

struct Inputs {  // shapes as in op.h; a_log and initial_state may be empty
  Values q, k, v, z, beta_logit, a_log, dt_bias, initial_state;
  std::vector<int64_t> offsets;
};
struct Outputs {
  Values o, final_state;
};
struct Grads {
  Values q, k, v, z, beta_logit, a_log, dt_bias, initial_state;
};

inline double sigmoid(double x) { return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)); }
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

struct GateValue {
  double g, by_x, by_a_log;  // g, dg/dx, dg/dA_log
};

inline GateValue gate(const Dims& d, double x, double a) {
  if (d.gate == Gate::unbounded) return {-a * softplus(x), -a * sigmoid(x), -a * softplus(x)};
  const double u = a * x, s = sigmoid(u), slope = d.lower_bound * s * sigmoid(-u);
  return {d.lower_bound * s, slope == 0 ? 0 : a * slope, slope == 0 ? 0 : slope * u};
}

// One value head of one document; tokens are counted in the whole pack.
struct Walk {
  const Dims& d;
  const Inputs& in;
  int64_t head, document;

  double scale() const { return d.scale != 0 ? d.scale : 1 / std::sqrt(double(d.key_dim)); }
  double bound() const { return d.negative_eigenvalues ? 2 : 1; }
  double a() const { return in.a_log.empty() ? 1.0 : std::exp(in.a_log[size_t(head)]); }
  int64_t begin() const { return in.offsets[size_t(document)]; }
  int64_t end() const { return in.offsets[size_t(document) + 1]; }
  size_t qk(int64_t t, int64_t c) const {
    return size_t((t * d.heads + head / (d.value_heads / d.heads)) * d.key_dim + c);
  }
  size_t value(int64_t t, int64_t v) const { return size_t((t * d.value_heads + head) * d.value_dim + v); }
  size_t channel(int64_t t, int64_t c) const { return size_t((t * d.value_heads + head) * d.key_dim + c); }
  size_t scalar(int64_t t) const { return size_t(t * d.value_heads + head); }
  size_t bias(int64_t c) const { return size_t(head * d.key_dim + c); }
  size_t state(int64_t v, int64_t c) const {
    return size_t(((document * d.value_heads + head) * d.value_dim + v) * d.key_dim + c);
  }
  size_t local(int64_t v, int64_t c) const { return size_t(v * d.key_dim + c); }
  GateValue gate_of(int64_t t, int64_t c) const { return gate(d, in.z[channel(t, c)] + in.dt_bias[bias(c)], a()); }

  Values first_state() const {
    Values s(size_t(d.value_dim * d.key_dim));
    if (!in.initial_state.empty()) std::copy_n(in.initial_state.begin() + int64_t(state(0, 0)), s.size(), s.begin());
    return s;
  }

  // Decays s to Sbar in place; returns e = v - Sbar^T k.
  Values decay(int64_t t, Values& s) const {
    Values e(static_cast<size_t>(d.value_dim));
    for (int64_t c = 0; c < d.key_dim; ++c) {
      const double alpha = std::exp(gate_of(t, c).g);
      for (int64_t v = 0; v < d.value_dim; ++v) s[local(v, c)] *= alpha;
    }
    for (int64_t v = 0; v < d.value_dim; ++v) {
      e[size_t(v)] = in.v[value(t, v)];
      for (int64_t c = 0; c < d.key_dim; ++c) e[size_t(v)] -= s[local(v, c)] * in.k[qk(t, c)];
    }
    return e;
  }
  double beta(int64_t t) const { return bound() * sigmoid(in.beta_logit[scalar(t)]); }
  void update(int64_t t, const Values& e, Values& s) const {
    for (int64_t v = 0; v < d.value_dim; ++v) {
      for (int64_t c = 0; c < d.key_dim; ++c) s[local(v, c)] += beta(t) * e[size_t(v)] * in.k[qk(t, c)];
    }
  }

  void forward(Outputs& out) const {
    Values s = first_state();
    for (int64_t t = begin(); t < end(); ++t) {
      const Values e = decay(t, s);
      update(t, e, s);
      for (int64_t v = 0; v < d.value_dim; ++v) {
        double sum = 0;
        for (int64_t c = 0; c < d.key_dim; ++c) sum += s[local(v, c)] * in.q[qk(t, c)];
        out.o[value(t, v)] = scale() * sum;
      }
    }
    std::copy(s.begin(), s.end(), out.final_state.begin() + int64_t(state(0, 0)));
  }

  void backward(const Values& d_o, const Values& d_final, Grads& g) const {
    std::vector<Values> before{first_state()};  // the state each token begins from
    for (int64_t t = begin(); t < end(); ++t) {
      Values s = before.back();
      update(t, decay(t, s), s);
      before.push_back(s);
    }
    Values x(before.front().size());
    if (!d_final.empty()) std::copy_n(d_final.begin() + int64_t(state(0, 0)), x.size(), x.begin());
    for (int64_t t = end() - 1; t >= begin(); --t) {
      backward_token(t, before[size_t(t - begin())], before[size_t(t - begin()) + 1], d_o, x, g);
    }
    std::copy(x.begin(), x.end(), g.initial_state.begin() + int64_t(state(0, 0)));
  }

  void backward_token(int64_t t, const Values& before, const Values& after, const Values& d_o, Values& x,
                      Grads& g) const {
    Values sbar = before;
    const Values e = decay(t, sbar);
    Values y(e.size());
    double d_beta = 0;
    for (int64_t v = 0; v < d.value_dim; ++v) {
      const double d_out = d_o[value(t, v)];
      double dr = 0;
      for (int64_t c = 0; c < d.key_dim; ++c) {
        g.q[qk(t, c)] += scale() * after[local(v, c)] * d_out;
        x[local(v, c)] += scale() * in.q[qk(t, c)] * d_out;
        dr += x[local(v, c)] * in.k[qk(t, c)];
        g.k[qk(t, c)] += x[local(v, c)] * beta(t) * e[size_t(v)];
      }
      d_beta += dr * e[size_t(v)];
      y[size_t(v)] = g.v[value(t, v)] = beta(t) * dr;
    }
    const double logit = in.beta_logit[scalar(t)];
    g.beta_logit[scalar(t)] = d_beta * bound() * sigmoid(logit) * sigmoid(-logit);
    for (int64_t c = 0; c < d.key_dim; ++c) {
      const GateValue value_of_gate = gate_of(t, c);
      double dg = 0;
      for (int64_t v = 0; v < d.value_dim; ++v) {
        g.k[qk(t, c)] -= sbar[local(v, c)] * y[size_t(v)];
        x[local(v, c)] -= in.k[qk(t, c)] * y[size_t(v)];
        dg += x[local(v, c)] * sbar[local(v, c)];
        x[local(v, c)] *= std::exp(value_of_gate.g);
      }
      g.z[channel(t, c)] = value_of_gate.by_x * dg;
      g.dt_bias[bias(c)] += value_of_gate.by_x * dg;
      if (!g.a_log.empty()) g.a_log[size_t(head)] += value_of_gate.by_a_log * dg;
    }
  }
};

inline size_t state_elements(const Dims& d, const Inputs& in) {
  return (in.offsets.size() - 1) * size_t(d.value_heads * d.value_dim * d.key_dim);
}

inline Outputs forward(const Dims& d, const Inputs& in) {
  Outputs out{Values(in.v.size()), Values(state_elements(d, in))};
  for (int64_t n = 0; n + 1 < int64_t(in.offsets.size()); ++n) {
    for (int64_t h = 0; h < d.value_heads; ++h) Walk{d, in, h, n}.forward(out);
  }
  return out;
}

// d_final may be empty: zeros.
inline Grads backward(const Dims& d, const Inputs& in, const Values& d_o, const Values& d_final) {
  Grads g{Values(in.q.size()),       Values(in.k.size()),          Values(in.v.size()),
          Values(in.z.size()),       Values(in.beta_logit.size()), Values(in.a_log.size()),
          Values(in.dt_bias.size()), Values(state_elements(d, in))};
  for (int64_t n = 0; n + 1 < int64_t(in.offsets.size()); ++n) {
    for (int64_t h = 0; h < d.value_heads; ++h) Walk{d, in, h, n}.backward(d_o, d_final, g);
  }
  return g;
}

}  // namespace tessera::ops::kda::reference
