// The bias of the next step from the counters of this one. moe.md 2.2 (steps 2 to 5), 2.7, 2.8. E B integers a layer
// and step: plain loops in float64, in a fixed order, so that every rank that holds the same counters gets the same
// bits.
#include "ops/router/balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/host_copy.h"
#include "ops/router/bins.h"
#include "ops/router/scores.h"

namespace tessera::ops::router {
namespace {

void check_histogram(const View& histogram, int64_t tokens) {
  const int64_t bins = histogram.dim(1);
  for (int64_t j = 0; j < histogram.dim(0); ++j) {
    const int32_t* row = histogram.as<int32_t>() + j * bins;
    const int64_t sum = std::accumulate(row, row + bins, int64_t{0});
    TESSERA_CHECK(sum == tokens, "router histogram of expert {} holds {} tokens, the step counted {}", j, sum, tokens);
  }
}

// The candidates before centring.
template <class Real>
std::vector<double> quantile_bias(const Dims& d, const BalanceOptions& options, const Real* bias,
                                  const Counters& counters, double q, BalanceReport& report) {
  const int64_t tokens = *counters.pending_tokens.as<int64_t>();
  check_view(counters.histogram, DType::i32, {d.experts, options.bins}, "router histogram");
  check_histogram(counters.histogram, tokens);
  const BinLayout<Real> layout(options, bias, d.experts);
  std::vector<double> next(static_cast<size_t>(d.experts));
  for (int64_t j = 0; j < d.experts; ++j) {
    const int32_t* row = counters.histogram.as<int32_t>() + j * options.bins;
    const Quantile found = quantile_of(layout.of(j), row, q, tokens);
    report.largest_bin_mass = std::max(report.largest_bin_mass, found.bin_mass);
    next[size_t(j)] = options.smoothing * double(bias[j]) + (1 - options.smoothing) * found.margin;
  }
  return next;
}

template <class Real>
std::vector<double> sign_bias(const Dims& d, const BalanceOptions& options, const Real* bias, const Counters& counters,
                              double q) {
  std::vector<double> next(static_cast<size_t>(d.experts));
  for (int64_t j = 0; j < d.experts; ++j) {
    const double missing = q - static_cast<double>(counters.pending_load.as<int64_t>()[j]);
    next[size_t(j)] = double(bias[j]) + options.sign_step * ((missing > 0) - (missing < 0));
  }
  return next;
}

template <class Real>
void move_bias(const Dims& d, const BalanceOptions& options, Real* bias, const Counters& counters, double q,
               BalanceReport& report) {
  const bool quantiles = counts_quantiles(options.method);
  const std::vector<double> next =
      quantiles ? quantile_bias(d, options, bias, counters, q, report) : sign_bias(d, options, bias, counters, q);
  const double mean = std::accumulate(next.begin(), next.end(), 0.0) / static_cast<double>(d.experts);
  for (int64_t j = 0; j < d.experts; ++j) {
    const Real moved = Real(next[size_t(j)] - mean);
    report.step = std::max(report.step, std::fabs(double(moved) - double(bias[j])));
    bias[j] = moved;
  }
  report.moved = true;
}

// Once a step and layer: the integers pass through the host (2 MB at 896 experts), so that there is one solver.
BalanceReport balance_on_host(const Dims& d, const BalanceOptions& options, const View& bias, const Counters& c) {
  const HostCopy host_bias(bias), load(c.load), weight(c.weight), by_bias(c.by_bias), tokens(c.tokens),
      invalid(c.invalid), histogram(c.histogram), pending_load(c.pending_load), pending_tokens(c.pending_tokens);
  const BalanceReport report = balance(d, options, host_bias.view(),
                                       {.load = load.view(),
                                        .weight = weight.view(),
                                        .by_bias = by_bias.view(),
                                        .tokens = tokens.view(),
                                        .invalid = invalid.view(),
                                        .output_squares = {},
                                        .histogram = histogram.view(),
                                        .pending_load = pending_load.view(),
                                        .pending_tokens = pending_tokens.view(),
                                        .room = {}});
  for (const HostCopy* copied :
       {&host_bias, &load, &weight, &by_bias, &tokens, &invalid, &histogram, &pending_load, &pending_tokens}) {
    copied->put_back();
  }
  if (c.output_squares.present()) c.output_squares.zero();
  return report;
}

void report_loads(const Dims& d, const Counters& counters, double q, BalanceReport& report) {
  const int64_t* load = counters.pending_load.as<int64_t>();
  const auto [min, max] = std::minmax_element(load, load + d.experts);
  report.max_vio = static_cast<double>(*max) / q - 1;
  report.min_load = static_cast<double>(*min) / q;
  report.floor = std::sqrt(2 * std::log(static_cast<double>(d.experts)) / q);
  report.dead = std::count(load, load + d.experts, int64_t{0});
}

// The step joins those that wait.
void add_to_pending(const Dims& d, const Counters& c) {
  for (int64_t j = 0; j < d.experts; ++j) c.pending_load.as<int64_t>()[j] += c.load.as<int64_t>()[j];
  *c.pending_tokens.as<int64_t>() += *c.tokens.as<int64_t>();
}

void zero(std::initializer_list<View> views) {
  for (const View& view : views) {
    if (view.present()) view.zero();
  }
}

void clear_step(const Counters& c) { zero({c.load, c.weight, c.by_bias, c.tokens, c.invalid, c.output_squares}); }
void clear_pending(const Counters& c) { zero({c.histogram, c.pending_load, c.pending_tokens}); }

View histogram_in(const View& room, int64_t experts, int64_t bins) {
  return room.row_range(0, experts * bins).reshaped({experts, bins});
}

void check_options(const BalanceOptions& o) {
  TESSERA_CHECK(o.bins >= 1 && o.width >= 1e-9, "router balance: {} bins, width {}", o.bins, o.width);
}

}  // namespace

Counters allocate_counters(Arena& arena, int64_t experts, const BalanceOptions& options, const CountersWanted& wanted) {
  check_options(options);
  Counters c{.load = arena.allocate_zeroed(DType::i64, {experts}),
             .weight = arena.allocate_zeroed(DType::f64, {experts}),
             .by_bias = arena.allocate_zeroed(DType::i64, {experts}),
             .tokens = arena.allocate_zeroed(DType::i64, {1}),
             .invalid = arena.allocate_zeroed(DType::i64, {1}),
             .output_squares = wanted.output_squares ? arena.allocate_zeroed(DType::f64, {experts}) : View(),
             .histogram = {},
             .pending_load = arena.allocate_zeroed(DType::i64, {experts}),
             .pending_tokens = arena.allocate_zeroed(DType::i64, {1}),
             .room = {}};
  if (counts_quantiles(options.method)) {
    c.room = arena.allocate_zeroed(DType::i32, {experts * std::max(options.bins, wanted.most_bins)});
    c.histogram = histogram_in(c.room, experts, options.bins);
  }
  return c;
}

void clear(const Counters& counters) {
  clear_step(counters);
  clear_pending(counters);
}

void restart(Counters& counters, const BalanceOptions& options) {
  check_options(options);
  const int64_t experts = counters.load.elements();
  if (!counts_quantiles(options.method)) {
    counters.histogram = {};
  } else {
    TESSERA_CHECK(experts * options.bins <= counters.room.elements(), "router histogram of {} bins in room for {}",
                  experts * options.bins, counters.room.elements());
    counters.histogram = histogram_in(counters.room, experts, options.bins);
  }
  clear(counters);
}

BalanceReport balance(const Dims& d, const BalanceOptions& options, const View& bias, const Counters& counters) {
  if (bias.data() == nullptr) return {};  // a dry run
  check_dims(d);
  check_view(bias, bias.dtype(), {d.experts}, "router bias");
  if (bias.memory() == Memory::gpu) return balance_on_host(d, options, bias, counters);
  BalanceReport report;
  add_to_pending(d, counters);
  clear_step(counters);
  const double tokens = static_cast<double>(*counters.pending_tokens.as<int64_t>());
  const double q = tokens * static_cast<double>(d.top_k) / static_cast<double>(d.experts);
  const bool moves = options.method != Balance::none && d.top_k < d.experts;
  if (tokens > 0) report_loads(d, counters, q, report);
  const bool wait = moves && (tokens == 0 || q < options.min_tokens);
  dispatch_real(bias.dtype(), [&](auto real) {
    using Real = decltype(real);
    Real* b = bias.as<Real>();
    if (moves && !wait) move_bias(d, options, b, counters, q, report);
    const auto [min, max] = std::minmax_element(b, b + d.experts);
    report.spread = double(*max) - double(*min);
  });
  if (!wait) clear_pending(counters);
  return report;
}

}  // namespace tessera::ops::router
