// Counts of one micro-batch. moe.md 2.2 (histogram) and 2.7 (loads).
//
// The histogram is E increments a token, spread over E x B counters. An item of work owns 16 experts, whose 16 x B
// counters stay in the first-level cache while all tokens pass, and no counter is shared by threads. Everything is an
// integer but the weight sums, which are added token by token in order.
#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "ops/router/balance.h"
#include "ops/router/bins.h"
#include "ops/router/cuda.h"
#include "ops/router/scores.h"

namespace tessera::ops::router {
namespace {

constexpr int64_t kLanes = 16;  // experts of one item

struct CountWorkspace {
  View row_scale;  // (T, 2): softmax's max and inverse sum of each row; absent for sigmoid
  View by_bias;    // (T, k) u8: the slot's expert is not among the k best of s
  View scores;     // (threads, E): s of one row
};

Costs count_costs(const Dims& d, DType dtype, const BalanceOptions& options, Device back_end) {
  const int64_t element = bytes_of(dtype), n = d.tokens * d.experts;
  const int64_t scale = d.score == Score::softmax ? Arena::aligned(d.tokens * 2 * element) : 0;
  const int64_t own =
      back_end == Device::cuda ? cuda::kParts * d.experts * bytes_of(DType::f64) : thread_count() * d.experts * element;
  return {.vector_flops = (counts_quantiles(options.method) ? 60 : 20) * n,
          .bytes_moved = 2 * n * element + d.experts * options.bins * 4,
          .workspace_bytes = scale + Arena::aligned(d.tokens * d.top_k) + Arena::aligned(own)};
}

// The scores' and the bins' constants of kLanes experts; lanes past the last expert compute and count nothing.
template <class Real>
struct LaneBins {
  Real bias[kLanes] = {}, begin[kLanes] = {}, per_unit[kLanes] = {};
  Real inverse_width, last;

  LaneBins(const BinLayout<Real>& layout, const BalanceOptions& options, int64_t first, int64_t lanes)
      : inverse_width(Real(1 / options.width)), last(Real(options.bins - 1)) {
    for (int64_t l = 0; l < lanes; ++l) {
      const ExpertBins bins = layout.of(first + l);
      bias[l] = Real(bins.bias);
      begin[l] = Real(bins.begin);
      per_unit[l] = Real(bins.per_unit());
    }
  }
};

template <Score kScore, bool kCentred, class Real>
void bins_of_token(const LaneBins<Real>& lanes, const Real* z, Real cutoff, const RowScale<Real>& row, int32_t* bin) {
#pragma omp simd
  for (int64_t l = 0; l < kLanes; ++l) {
    const Real r = cutoff - score_of<kScore>(z[l], row);
    const Real y = kCentred ? fast_asinh((r - lanes.bias[l]) * lanes.inverse_width) : r;
    Real t = (y - lanes.begin[l]) * lanes.per_unit[l];
    t = t > 0 ? t : 0;  // also where NaN, from a lane past the last expert
    t = t < lanes.last ? t : lanes.last;
    bin[l] = static_cast<int32_t>(t);
  }
}

template <Score kScore, bool kCentred, class Real>
void count_lanes(const Dims& d, const Inputs& in, const Outputs& out, const BalanceOptions& options,
                 const CountWorkspace& workspace, int32_t* histogram, int64_t first) {
  const int64_t lanes = std::min(kLanes, d.experts - first);
  const LaneBins<Real> bins(BinLayout<Real>(options, in.bias.as<Real>(), d.experts), options, first, lanes);
  const int32_t* experts = out.experts.as<int32_t>();
  const Real* cutoff = out.cutoff.as<Real>();
  Real z[kLanes] = {};
  int32_t bin[kLanes];
  for (int64_t i = 0; i < d.tokens; ++i) {
    if (experts[i * d.top_k] < 0) continue;
    RowScale<Real> row;
    if constexpr (kScore == Score::softmax) {
      const Real* scale = workspace.row_scale.as<Real>() + 2 * i;
      row = {scale[0], scale[1]};
    }
    std::copy_n(in.logits.as<Real>() + i * in.logits.row_stride() + first, lanes, z);
    bins_of_token<kScore, kCentred>(bins, z, cutoff[i], row, bin);
    for (int64_t l = 0; l < lanes; ++l) ++histogram[(first + l) * options.bins + bin[l]];
  }
}

template <class Real>
void count_histogram(const Dims& d, const Inputs& in, const Outputs& out, const BalanceOptions& options,
                     const CountWorkspace& workspace, const View& histogram) {
  if (d.score == Score::softmax) {
    parallel_ranges(d.tokens, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto row = softmax_scale(in.logits.as<Real>() + i * in.logits.row_stride(), d.experts);
        workspace.row_scale.as<Real>()[2 * i] = row.max;
        workspace.row_scale.as<Real>()[2 * i + 1] = row.inverse_sum;
      }
    });
  }
  const bool sigmoid = d.score == Score::sigmoid, centred = options.method == Balance::quantile_centred;
  const auto lanes =
      sigmoid ? (centred ? count_lanes<Score::sigmoid, true, Real> : count_lanes<Score::sigmoid, false, Real>)
              : (centred ? count_lanes<Score::softmax, true, Real> : count_lanes<Score::softmax, false, Real>);
  parallel_items((d.experts + kLanes - 1) / kLanes,
                 [&](int64_t item) { lanes(d, in, out, options, workspace, histogram.as<int32_t>(), item * kLanes); });
}

// Experts that come before expert j in the order of s.
template <class Real>
int64_t rank_of(const Real* s, int64_t experts, int64_t j) {
  int before = 0;
  const Real s_j = s[j];
#pragma omp simd reduction(+ : before)
  for (int64_t r = 0; r < experts; ++r) before += s[r] > s_j ? 1 : 0;
  for (int64_t r = 0; r < j; ++r) before += s[r] == s_j ? 1 : 0;
  return before;
}

template <class Real>
void mark_by_bias(const Dims& d, const Inputs& in, const Outputs& out, const CountWorkspace& workspace) {
  parallel_ranges(d.tokens, std::max<int64_t>(1, 4096 / d.experts), [&](int64_t begin, int64_t end) {
    Real* s = workspace.scores.as<Real>() + omp_get_thread_num() * d.experts;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t* experts = out.experts.as<int32_t>() + i * d.top_k;
      uint8_t* marks = workspace.by_bias.as<uint8_t>() + i * d.top_k;
      std::fill_n(marks, d.top_k, uint8_t{0});
      if (experts[0] < 0) continue;
      row_scores(d.score, in.logits.as<Real>() + i * in.logits.row_stride(), d.experts, s);
      // The selected are the k best of s exactly when the last of them has k - 1 before it.
      const int32_t last = *std::max_element(
          experts, experts + d.top_k, [&](int32_t a, int32_t b) { return s[a] > s[b] || (s[a] == s[b] && a < b); });
      if (rank_of(s, d.experts, last) < d.top_k) continue;
      for (int64_t r = 0; r < d.top_k; ++r) marks[r] = rank_of(s, d.experts, experts[r]) >= d.top_k ? 1 : 0;
    }
  });
}

template <class Real>
void count_selected(const Dims& d, const Outputs& out, const CountWorkspace& workspace, const Counters& counters) {
  int64_t *load = counters.load.as<int64_t>(), *by_bias = counters.by_bias.as<int64_t>(), tokens = 0;
  double* weight = counters.weight.as<double>();
  const int32_t* experts = out.experts.as<int32_t>();
  for (int64_t i = 0; i < d.tokens; ++i) {
    if (experts[i * d.top_k] < 0) continue;
    ++tokens;
    for (int64_t slot = i * d.top_k; slot < (i + 1) * d.top_k; ++slot) {
      const int32_t j = experts[slot];
      ++load[j];
      weight[j] += double(out.weights.as<Real>()[slot]);
      by_bias[j] += workspace.by_bias.as<uint8_t>()[slot];
    }
  }
  *counters.tokens.as<int64_t>() += tokens;
}

}  // namespace

void count(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, const BalanceOptions& options,
           const Counters& counters) {
  const DType dtype = exact_type(in.logits.dtype());
  const bool histogram = counts_quantiles(options.method);
  check_dims(d);
  check_strided_view(in.logits, dtype, {d.tokens, d.experts}, "router count logits");
  check_view(in.bias, dtype, {d.experts}, "router count bias");
  check_view(out.experts, DType::i32, {d.tokens, d.top_k}, "router count experts");
  check_view(out.weights, dtype, {d.tokens, d.top_k}, "router count weights");
  check_view(out.cutoff, dtype, {d.tokens}, "router count cutoff");
  check_view(counters.load, DType::i64, {d.experts}, "router load");
  if (histogram) check_view(counters.histogram, DType::i32, {d.experts, options.bins}, "router histogram");
  OpScope op(ctx, "router_count", Pass::forward, count_costs(d, dtype, options, ctx.back_end()));
  CountWorkspace workspace;
  if (d.score == Score::softmax) workspace.row_scale = ctx.arena.allocate(dtype, {d.tokens, 2});
  workspace.by_bias = ctx.arena.allocate(DType::u8, {d.tokens, d.top_k});
  if (ctx.back_end() == Device::cuda) {
    const View weights = ctx.arena.allocate(DType::f64, {cuda::kParts, d.experts});
    if (ctx.dry()) return;
    return cuda::count(ctx.stream(), d, in, out, options, counters, {workspace.row_scale, workspace.by_bias, weights});
  }
  workspace.scores = ctx.arena.allocate(dtype, {thread_count(), d.experts});
  if (ctx.dry()) return;
  dispatch_real(dtype, [&](auto real) {
    using Real = decltype(real);
    mark_by_bias<Real>(d, in, out, workspace);
    count_selected<Real>(d, out, workspace, counters);
    if (histogram && d.top_k < d.experts) {
      count_histogram<Real>(d, in, out, options, workspace, counters.histogram);
    }
  });
}

}  // namespace tessera::ops::router
