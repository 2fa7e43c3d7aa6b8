// The bias of the next step from the counters of this one. moe.md 2.2 (steps 2 to 5), 2.7, 2.8. E B integers a layer
// and step: plain loops in float64, in a fixed order, so that every rank that holds the same counters gets the same
// bits.
#include "ops/router/balance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

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
  const int64_t tokens = *counters.tokens.as<int64_t>();
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
    const double missing = q - static_cast<double>(counters.load.as<int64_t>()[j]);
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

// A view of the GPU in host memory, and back.
class HostCopy {
 public:
  explicit HostCopy(const View& gpu) : gpu_(gpu), bytes_(static_cast<size_t>(gpu.bytes())) {
    if (gpu_.present()) copy(gpu_, host());
  }
  View host() { return gpu_.present() ? View(bytes_.data(), gpu_.dtype(), gpu_.shape()) : View(); }
  void put_back() {
    if (gpu_.present()) copy(host(), gpu_);
  }

 private:
  View gpu_;
  std::vector<std::byte> bytes_;
};

// Once a step and layer: the integers pass through the host (2 MB at 896 experts), so that there is one solver.
BalanceReport balance_on_host(const Dims& d, const BalanceOptions& options, const View& bias,
                              const Counters& counters) {
  HostCopy host_bias(bias), load(counters.load), weight(counters.weight), by_bias(counters.by_bias),
      histogram(counters.histogram), tokens(counters.tokens);
  const BalanceReport report = balance(d, options, host_bias.host(),
                                       {.load = load.host(),
                                        .weight = weight.host(),
                                        .by_bias = by_bias.host(),
                                        .histogram = histogram.host(),
                                        .tokens = tokens.host()});
  for (HostCopy* copied : {&host_bias, &load, &weight, &by_bias, &histogram, &tokens}) copied->put_back();
  return report;
}

void report_loads(const Dims& d, const Counters& counters, double q, BalanceReport& report) {
  const int64_t* load = counters.load.as<int64_t>();
  const auto [min, max] = std::minmax_element(load, load + d.experts);
  report.max_vio = static_cast<double>(*max) / q - 1;
  report.min_load = static_cast<double>(*min) / q;
  report.floor = std::sqrt(2 * std::log(static_cast<double>(d.experts)) / q);
  report.dead = std::count(load, load + d.experts, int64_t{0});
}

}  // namespace

Counters allocate_counters(Arena& arena, int64_t experts, const BalanceOptions& options) {
  TESSERA_CHECK(options.bins >= 1 && options.width >= 1e-9, "router balance: {} bins, width {}", options.bins,
                options.width);
  Counters counters{.load = arena.allocate_zeroed(DType::i64, {experts}),
                    .weight = arena.allocate_zeroed(DType::f64, {experts}),
                    .by_bias = arena.allocate_zeroed(DType::i64, {experts}),
                    .histogram = {},
                    .tokens = arena.allocate_zeroed(DType::i64, {1})};
  if (counts_quantiles(options.method)) {
    counters.histogram = arena.allocate_zeroed(DType::i32, {experts, options.bins});
  }
  return counters;
}

void clear(const Counters& counters) {
  for (const View& view : {counters.load, counters.weight, counters.by_bias, counters.histogram, counters.tokens}) {
    if (view.present()) view.zero();
  }
}

BalanceReport balance(const Dims& d, const BalanceOptions& options, const View& bias, const Counters& counters) {
  if (bias.data() == nullptr) return {};  // a dry run
  check_dims(d);
  check_view(bias, bias.dtype(), {d.experts}, "router bias");
  if (bias.memory() == Memory::gpu) return balance_on_host(d, options, bias, counters);
  BalanceReport report;
  const double tokens = static_cast<double>(*counters.tokens.as<int64_t>());
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
  if (!wait) clear(counters);
  return report;
}

}  // namespace tessera::ops::router
