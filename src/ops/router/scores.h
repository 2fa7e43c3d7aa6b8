// Scores of one row of logits, shared by routing and by counting, so that both see the same s.
#pragma once

#include <algorithm>
#include <limits>

#include "core/fast_math.h"
#include "ops/router/op.h"

namespace tessera::ops::router {

// What a row's scores need besides the logit itself.
template <class Real>
struct RowScale {
  Real max = 0, inverse_sum = 1;  // softmax only
};

template <class Real>
bool all_finite(const Real* z, int64_t experts) {
  int bad = 0;
#pragma omp simd reduction(| : bad)
  for (int64_t j = 0; j < experts; ++j) bad |= std::fabs(z[j]) <= std::numeric_limits<Real>::max() ? 0 : 1;
  return bad == 0;
}

template <class Real>
RowScale<Real> softmax_scale(const Real* z, int64_t experts) {
  Real max = z[0], sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < experts; ++j) max = z[j] > max ? z[j] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < experts; ++j) sum += fast::exp(z[j] - max);
  return {max, 1 / sum};
}

template <Score kScore, class Real>
[[gnu::always_inline]] inline Real score_of(Real z, const RowScale<Real>& row) {
  return kScore == Score::sigmoid ? fast::sigmoid(z) : fast::exp(z - row.max) * row.inverse_sum;
}

// s of the whole row.
template <class Real>
void row_scores(Score score, const Real* z, int64_t experts, Real* s) {
  if (score == Score::sigmoid) {
#pragma omp simd
    for (int64_t j = 0; j < experts; ++j) s[j] = score_of<Score::sigmoid>(z[j], RowScale<Real>{});
  } else {
    const auto row = softmax_scale(z, experts);
#pragma omp simd
    for (int64_t j = 0; j < experts; ++j) s[j] = score_of<Score::softmax>(z[j], row);
  }
}

}  // namespace tessera::ops::router
