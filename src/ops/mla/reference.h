// Causal softmax attention inside documents, by definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::mla::reference {

struct Problem {
  int64_t tokens, heads, nope_dim, rope_dim, value_dim;
  double scale;
  std::vector<int64_t> offsets;  // (N + 1)
};
struct Result {
  std::vector<double> o;          // (T, H, d_v)
  std::vector<double> max_logit;  // (H), raised from the values given
};

inline double logit(const Problem& p, const std::vector<double>& q, const std::vector<double>& kv,
                    const std::vector<double>& k_shared, int64_t i, int64_t j, int64_t h) {
  const double* q_row = q.data() + (i * p.heads + h) * (p.nope_dim + p.rope_dim);
  const double* k_row = kv.data() + (j * p.heads + h) * (p.nope_dim + p.value_dim);
  double dot = 0;
  for (int64_t c = 0; c < p.nope_dim; ++c) dot += q_row[c] * k_row[c];
  for (int64_t c = 0; c < p.rope_dim; ++c) dot += q_row[p.nope_dim + c] * k_shared[size_t(j * p.rope_dim + c)];
  return p.scale * dot;
}

inline Result forward(const Problem& p, const std::vector<double>& q, const std::vector<double>& kv,
                      const std::vector<double>& k_shared, std::vector<double> max_logit) {
  Result result{std::vector<double>(size_t(p.tokens * p.heads * p.value_dim), 0.0), std::move(max_logit)};
  for (size_t n = 0; n + 1 < p.offsets.size(); ++n) {
    for (int64_t i = p.offsets[n]; i < p.offsets[n + 1]; ++i) {
      for (int64_t h = 0; h < p.heads; ++h) {
        std::vector<double> weight;
        for (int64_t j = p.offsets[n]; j <= i; ++j) weight.push_back(logit(p, q, kv, k_shared, i, j, h));
        const double top = *std::max_element(weight.begin(), weight.end());
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - top);
        result.max_logit[size_t(h)] = std::max(result.max_logit[size_t(h)], top);
        double* o = result.o.data() + (i * p.heads + h) * p.value_dim;
        for (size_t j = 0; j < weight.size(); ++j) {
          const int64_t row = (p.offsets[n] + int64_t(j)) * p.heads + h;
          const double* v = kv.data() + row * (p.nope_dim + p.value_dim) + p.nope_dim;
          for (int64_t c = 0; c < p.value_dim; ++c) o[c] += weight[j] / sum * v[c];
        }
      }
    }
  }
  return result;
}

}  // namespace tessera::ops::mla::reference
