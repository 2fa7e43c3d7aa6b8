// Routing and exact quantile balancing by definition, in float64: moe.md 1.1, 2.1, 2.3
// and 6 (z-loss).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/router/op.h"

namespace tessera::ops::router::reference {

using Values = std::vector<double>;

struct Routing {
  Values experts, weights, scores, cutoff, all_scores;
  double invalid = 0;
};

inline Values scores_of(Score score, const Values& z) {
  Values s(z.size());
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double v : z) sum += std::exp(v - max);
  for (size_t j = 0; j < z.size(); ++j) {
    s[j] = score == Score::sigmoid ? 1 / (1 + std::exp(-z[j])) : std::exp(z[j] - max) / sum;
  }
  return s;
}

// Indices by (value falling, index rising).
inline std::vector<size_t> order_of(const Values& c) {
  std::vector<size_t> order(c.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return c[a] > c[b]; });
  return order;
}

inline void limit_groups(const Dims& d, Values& c) {
  const size_t size = size_t(d.experts / d.groups);
  Values judged;
  for (size_t g = 0; g < size_t(d.groups); ++g) {
    const Values group(c.begin() + long(g * size), c.begin() + long((g + 1) * size));
    const auto order = order_of(group);
    judged.push_back(group[order[0]] + (size > 1 ? group[order[1]] : 0));
  }
  const auto order = order_of(judged);
  for (size_t r = size_t(d.top_groups); r < order.size(); ++r) {
    for (size_t j = 0; j < size; ++j) c[order[r] * size + j] = -std::numeric_limits<double>::infinity();
  }
}

inline Routing route(const Dims& d, const Values& logits, const Values& bias) {
  Routing out;
  const size_t k = size_t(d.top_k);
  for (int64_t i = 0; i < d.tokens; ++i) {
    const Values z(logits.begin() + i * d.experts, logits.begin() + (i + 1) * d.experts);
    const bool invalid = !std::all_of(z.begin(), z.end(), [](double v) { return std::isfinite(v); });
    const Values s = invalid ? Values(z.size(), 0.0) : scores_of(d.score, z);
    out.invalid += invalid ? 1 : 0;
    out.all_scores.insert(out.all_scores.end(), s.begin(), s.end());
    Values c = s;
    for (size_t j = 0; j < c.size(); ++j) c[j] += bias[j];
    if (d.groups > 1) limit_groups(d, c);
    const auto order = order_of(c);
    double sum = 0;
    for (size_t r = 0; r < k; ++r) sum += s[order[r]];
    for (size_t r = 0; r < k; ++r) {
      const double s_r = s[order[r]];
      out.experts.push_back(invalid ? -1 : double(order[r]));
      out.scores.push_back(s_r);
      out.weights.push_back(invalid ? 0 : d.renormalise && d.top_k > 1 ? d.scale * s_r / sum : d.scale * s_r);
    }
    const double next = k < c.size() ? c[order[k]] : -std::numeric_limits<double>::infinity();
    out.cutoff.push_back(invalid ? 0 : std::isfinite(next) ? next : *std::min_element(bias.begin(), bias.end()));
  }
  return out;
}

inline std::vector<int64_t> loads(const Dims& d, const Routing& routing) {
  std::vector<int64_t> load(size_t(d.experts), 0);
  for (double j : routing.experts) {
    if (j >= 0) ++load[size_t(j)];
  }
  return load;
}

// Margins r_ij = cutoff_i - s_ij of expert j, sorted.
inline Values margins_of(const Dims& d, const Routing& routing, int64_t expert) {
  Values r;
  for (int64_t i = 0; i < d.tokens; ++i) {
    if (routing.experts[size_t(i * d.top_k)] < 0) continue;
    r.push_back(routing.cutoff[size_t(i)] - routing.all_scores[size_t(i * d.experts + expert)]);
  }
  std::sort(r.begin(), r.end());
  return r;
}

inline Values centred(Values b) {
  const double mean = std::accumulate(b.begin(), b.end(), 0.0) / double(b.size());
  for (double& v : b) v -= mean;
  return b;
}

// One exact update before centring: the (floor(q) + 1)-th smallest margin of each expert.
inline Values exact_bias(const Dims& d, const Routing& routing) {
  Values b;
  for (int64_t j = 0; j < d.experts; ++j) {
    const Values r = margins_of(d, routing, j);
    b.push_back(r[r.size() * size_t(d.top_k) / size_t(d.experts)]);
  }
  return b;
}

// The dual D of the balanced assignment at (alpha, beta = -b): moe.md 2.1.
inline double dual(const Dims& d, const Values& scores, const Values& alpha, const Values& bias) {
  double sum = 0;
  for (int64_t i = 0; i < d.tokens; ++i) {
    sum += double(d.top_k) * alpha[size_t(i)];
    for (int64_t j = 0; j < d.experts; ++j) {
      sum += std::max(0.0, scores[size_t(i * d.experts + j)] - alpha[size_t(i)] + bias[size_t(j)]);
    }
  }
  const double q = double(d.tokens * d.top_k) / double(d.experts);
  return std::accumulate(bias.begin(), bias.end(), sum, [&](double a, double b) { return a - q * b; });
}

// logsumexp(z_i)^2 of every row.
inline Values z_loss(int64_t tokens, int64_t experts, const Values& logits) {
  Values loss;
  for (int64_t i = 0; i < tokens; ++i) {
    const auto z = logits.begin() + i * experts;
    const double max = *std::max_element(z, z + experts);
    double sum = 0;
    for (int64_t j = 0; j < experts; ++j) sum += std::exp(z[j] - max);
    loss.push_back(std::pow(max + std::log(sum), 2));
  }
  return loss;
}

}  // namespace tessera::ops::router::reference
