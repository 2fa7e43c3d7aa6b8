// Routing on the CPU: rows over the threads. moe.md 1.1 (forward), 1.2 (backward).
#include "ops/router/cpu.h"

#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "ops/router/scores.h"
#include "ops/router/select.h"

namespace tessera::ops::router::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 12;  // logits; below this a thread costs more than it saves
constexpr double kTiny = 1e-20;              // keeps 0 / 0 out of the weights where every selected score is 0

int64_t grain(const Dims& d) { return std::max<int64_t>(1, kGrainElements / d.experts); }
int64_t list_size(const Dims& d) { return std::min(d.top_k + 1, d.experts); }

template <class Real>
struct Scratch {
  Real *s, *c, *values, *groups;
  int32_t* indices;

  Scratch(const Dims& d, const Workspace& w) {
    const int64_t thread = omp_get_thread_num();
    s = w.reals.as<Real>() + thread * w.reals.row_elements();
    c = s + d.experts;
    values = c + d.experts;
    groups = values + list_size(d);
    indices = w.indices.as<int32_t>() + thread * w.indices.row_elements();
  }
};

// Group-limited selection: c becomes -infinity outside the best groups, a group judged by the sum of its two largest.
template <class Real>
void keep_best_groups(const Dims& d, const Scratch<Real>& scratch) {
  const int64_t size = d.experts / d.groups;
  Real* judged = scratch.groups;
  for (int64_t g = 0; g < d.groups; ++g) {
    Real best[2];
    int32_t where[2];
    const int64_t n = std::min<int64_t>(2, size);
    TopList<Real>(best, where, n).select(scratch.c + g * size, size);
    judged[g] = n == 2 ? best[0] + best[1] : best[0];
  }
  for (int64_t g = 0; g < d.groups; ++g) {
    int64_t before = 0;  // groups that come first, ties to the lower index
    for (int64_t o = 0; o < d.groups; ++o) before += judged[o] > judged[g] || (judged[o] == judged[g] && o < g) ? 1 : 0;
    if (before < d.top_groups) continue;
    std::fill_n(scratch.c + g * size, size, -std::numeric_limits<Real>::infinity());
  }
}

template <class Real>
struct RowOutputs {
  int32_t* experts;
  Real *weights, *scores, *cutoff, *all_scores;

  RowOutputs(const Dims& d, const Outputs& out, int64_t i)
      : experts(out.experts.as<int32_t>() + i * d.top_k),
        weights(out.weights.as<Real>() + i * d.top_k),
        scores(out.scores.as<Real>() + i * d.top_k),
        cutoff(out.cutoff.as<Real>() + i),
        all_scores(out.all_scores.present() ? out.all_scores.as<Real>() + i * d.experts : nullptr) {}
};

template <class Real>
void write_invalid(const Dims& d, const RowOutputs<Real>& row) {
  std::fill_n(row.experts, d.top_k, -1);
  std::fill_n(row.weights, d.top_k, Real(0));
  std::fill_n(row.scores, d.top_k, Real(0));
  *row.cutoff = 0;
  if (row.all_scores != nullptr) std::fill_n(row.all_scores, d.experts, Real(0));
}

template <class Real>
void route_row(const Dims& d, const Real* z, const Real* bias, Real no_cutoff, const Scratch<Real>& scratch,
               const RowOutputs<Real>& row) {
  if (!all_finite(z, d.experts)) return write_invalid(d, row);
  row_scores(d.score, z, d.experts, scratch.s);
  if (row.all_scores != nullptr) std::copy_n(scratch.s, d.experts, row.all_scores);
#pragma omp simd
  for (int64_t j = 0; j < d.experts; ++j) scratch.c[j] = scratch.s[j] + bias[j];
  if (d.groups > 1) keep_best_groups(d, scratch);
  TopList<Real>(scratch.values, scratch.indices, list_size(d)).select(scratch.c, d.experts);

  Real sum = 0;
  for (int64_t r = 0; r < d.top_k; ++r) {
    row.experts[r] = scratch.indices[r];
    row.scores[r] = scratch.s[scratch.indices[r]];
    sum += row.scores[r];
  }
  const Real scale = renormalised(d) ? Real(d.scale) / (sum + Real(kTiny)) : Real(d.scale);
  for (int64_t r = 0; r < d.top_k; ++r) row.weights[r] = scale * row.scores[r];
  const bool next_exists = d.top_k < d.experts && scratch.values[d.top_k] >= std::numeric_limits<Real>::lowest();
  *row.cutoff = next_exists ? scratch.values[d.top_k] : no_cutoff;
}

template <class Real>
void forward_rows(const Dims& d, const Inputs& in, const Outputs& out, const Workspace& workspace) {
  const Real* bias = in.bias.as<Real>();
  const Real no_cutoff = *std::min_element(bias, bias + d.experts);
  parallel_ranges(d.tokens, grain(d), [&](int64_t begin, int64_t end) {
    const Scratch<Real> scratch(d, workspace);
    for (int64_t i = begin; i < end; ++i) {
      route_row(d, in.logits.as<Real>() + i * in.logits.row_stride(), bias, no_cutoff, scratch,
                RowOutputs<Real>(d, out, i));
    }
  });
  int64_t invalid = 0;
  for (int64_t i = 0; i < d.tokens; ++i) invalid += out.experts.as<int32_t>()[i * d.top_k] < 0 ? 1 : 0;
  *out.invalid.as<int64_t>() += invalid;
}

// dz of one row; `dz` holds zeros. Q = sum of g p.
template <class Real>
void backward_row(const Dims& d, const RowOutputs<Real>& row, const Real* g, Real* dz) {
  Real pull = 0, sum = 0;
  for (int64_t r = 0; r < d.top_k; ++r) {
    pull += g[r] * row.weights[r];
    sum += row.scores[r];
  }
  const Real scale = Real(d.scale), inverse = 1 / (sum + Real(kTiny));
  if (needs_all_scores(d)) {
#pragma omp simd
    for (int64_t j = 0; j < d.experts; ++j) dz[j] = -row.all_scores[j] * pull;
  }
  for (int64_t r = 0; r < d.top_k; ++r) {
    const Real s = row.scores[r];
    Real& dz_r = dz[row.experts[r]];
    if (needs_all_scores(d)) {
      dz_r += scale * g[r] * s;
    } else if (d.score == Score::softmax) {
      dz_r = row.weights[r] * (g[r] - pull / scale);
    } else if (renormalised(d)) {
      dz_r = (scale * g[r] - pull) * inverse * s * (1 - s);
    } else {
      dz_r = scale * g[r] * s * (1 - s);
    }
  }
}

template <class Real>
void backward_rows(const Dims& d, const Outputs& out, const OutputGrads& dout, const Grads& grads) {
  parallel_ranges(d.tokens, grain(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Real* dz = grads.logits.as<Real>() + i * grads.logits.row_stride();
      std::fill_n(dz, d.experts, Real(0));
      const RowOutputs<Real> row(d, out, i);
      if (row.experts[0] >= 0) backward_row(d, row, dout.weights.as<Real>() + i * d.top_k, dz);
    }
  });
}

}  // namespace

Shape reals_shape(const Dims& d) { return {thread_count(), 2 * d.experts + list_size(d) + d.groups}; }
Shape indices_shape(const Dims& d) { return {thread_count(), list_size(d)}; }

void forward(const Dims& d, const Inputs& in, const Outputs& out, const Workspace& workspace) {
  dispatch_real(in.logits.dtype(), [&](auto real) { forward_rows<decltype(real)>(d, in, out, workspace); });
}

void backward(const Dims& d, const Outputs& out, const OutputGrads& dout, const Grads& grads) {
  dispatch_real(grads.logits.dtype(), [&](auto real) { backward_rows<decltype(real)>(d, out, dout, grads); });
}

}  // namespace tessera::ops::router::cpu
