// Causal softmax attention inside documents, and of one query over each of several latent caches, by definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tessera::ops::mla::reference {

struct Problem {
  int64_t tokens, heads, nope_dim, rope_dim, value_dim;
  double scale;
  std::vector<int64_t> offsets;           // (N + 1)
  std::vector<int64_t> key_offsets = {};  // of the keys; empty: offsets. Queries are a document's last positions.

  const std::vector<int64_t>& keys() const { return key_offsets.empty() ? offsets : key_offsets; }
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

// Row i of q over the keys [begin, end): adds to o (H, d_v), whose head h it is; the largest logit.
inline double attend(const Problem& p, const std::vector<double>& q, const std::vector<double>& kv,
                     const std::vector<double>& k_shared, int64_t i, int64_t begin, int64_t end, int64_t h, double* o) {
  std::vector<double> weight;
  for (int64_t j = begin; j < end; ++j) weight.push_back(logit(p, q, kv, k_shared, i, j, h));
  const double top = *std::max_element(weight.begin(), weight.end());
  double sum = 0;
  for (double& w : weight) sum += w = std::exp(w - top);
  for (size_t j = 0; j < weight.size(); ++j) {
    const int64_t row = (begin + int64_t(j)) * p.heads + h;
    const double* v = kv.data() + row * (p.nope_dim + p.value_dim) + p.nope_dim;
    for (int64_t c = 0; c < p.value_dim; ++c) o[h * p.value_dim + c] += weight[j] / sum * v[c];
  }
  return top;
}

inline Result forward(const Problem& p, const std::vector<double>& q, const std::vector<double>& kv,
                      const std::vector<double>& k_shared, std::vector<double> max_logit) {
  Result result{std::vector<double>(size_t(p.tokens * p.heads * p.value_dim), 0.0), std::move(max_logit)};
  for (size_t n = 0; n + 1 < p.offsets.size(); ++n) {
    for (int64_t i = p.offsets[n]; i < p.offsets[n + 1]; ++i) {
      const int64_t behind = p.offsets[n + 1] - 1 - i;  // queries, so also keys
      double* o = result.o.data() + i * p.heads * p.value_dim;
      for (int64_t h = 0; h < p.heads; ++h) {
        const double top = attend(p, q, kv, k_shared, i, p.keys()[n], p.keys()[n + 1] - behind, h, o);
        result.max_logit[size_t(h)] = std::max(result.max_logit[size_t(h)], top);
      }
    }
  }
  return result;
}

// The expanded form of one query (N, H, d_n + d_p) for each cache; cache n is the rows [offsets[n], offsets[n + 1]) of
// latent (S, r + d_p). kv_b (H * (d_n + d_v), r). o (N, H, d_v).
inline std::vector<double> decode(const Problem& p, int64_t rank, const std::vector<double>& q,
                                  const std::vector<double>& kv_b, const std::vector<double>& latent) {
  const int64_t keys = p.offsets.back(), up = p.heads * (p.nope_dim + p.value_dim), width = rank + p.rope_dim;
  std::vector<double> kv(size_t(keys * up)), k_shared(size_t(keys * p.rope_dim));
  for (int64_t j = 0; j < keys; ++j) {
    const double* row = latent.data() + j * width;
    std::copy_n(row + rank, p.rope_dim, k_shared.data() + j * p.rope_dim);
    for (int64_t c = 0; c < up; ++c) {
      double dot = 0;
      for (int64_t k = 0; k < rank; ++k) dot += row[k] * kv_b[size_t(c * rank + k)];
      kv[size_t(j * up + c)] = dot;
    }
  }
  std::vector<double> o(size_t(p.tokens * p.heads * p.value_dim), 0.0);
  for (int64_t n = 0; n < p.tokens; ++n) {
    double* own = o.data() + n * p.heads * p.value_dim;
    for (int64_t h = 0; h < p.heads; ++h) {
      attend(p, q, kv, k_shared, n, p.offsets[size_t(n)], p.offsets[size_t(n) + 1], h, own);
    }
  }
  return o;
}

}  // namespace tessera::ops::mla::reference
