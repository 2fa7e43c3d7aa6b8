// A whole step of balancing as a case of the op table: routing, counts, and the bias of the next step.
#include <algorithm>
#include <limits>
#include <numeric>

#include "ops/router/balance.h"
#include "ops/router/bins.h"
#include "ops/router/cases.h"
#include "ops/router/reference.h"

namespace tessera::ops::router {
namespace {

using check::GradientRule;
using check::Tensor;
using reference::Values;

void run(const Dims& d, const BalanceOptions& options, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1]};
  const Outputs out{r.outputs[0], r.outputs[1], r.outputs[2], r.outputs[3], r.outputs[4]};
  const Counters counters{.load = r.outputs[5],
                          .weight = r.outputs[6],
                          .by_bias = r.outputs[7],
                          .tokens = r.outputs[9],
                          .invalid = {},
                          .output_squares = {},
                          .histogram = r.outputs[8],
                          .pending_load = {},
                          .pending_tokens = {},
                          .room = {}};
  const View& next = r.outputs[10];
  out.invalid.zero();
  clear(counters);
  forward(r.context, d, in, out);
  count(r.context, d, in, out, options, counters);
  if (r.context.dry()) return;
  // Balancing clears the counters that are to be seen: it has a copy.
  Arena arena(int64_t{64} << 20, in.bias.memory());
  const Counters copies = allocate_counters(arena, d.experts, options);
  copy(counters.load, copies.load);
  copy(counters.weight, copies.weight);
  copy(counters.by_bias, copies.by_bias);
  copy(counters.histogram, copies.histogram);
  copy(counters.tokens, copies.tokens);
  copy(in.bias, next);
  balance(d, options, next, copies);
}

std::vector<Tensor> inputs(const Dims& d) {
  Tensor bias = check::random_tensor("bias", {d.experts}, 0.02, GradientRule::none);
  for (double& b : bias.values) b = std::clamp(b, -0.05, 0.05);
  Tensor logits = check::random_tensor("logits", {d.tokens, d.experts}, 1.5, GradientRule::none);
  if (d.score == Score::sigmoid) logits.values = separated_logits(d.tokens, bias.values, 1);
  for (int64_t row : {int64_t{5}, d.tokens - 1}) {  // routed nowhere and not counted
    logits.values[size_t(row * d.experts + row % d.experts)] = std::numeric_limits<double>::quiet_NaN();
  }
  bias.exact = logits.exact = true;
  return {logits, bias};
}

struct Counts {
  Values load, weight, by_bias, histogram, next;
  double tokens = 0;
};

// Margins of expert j in bins, and its bias of the next step.
void count_margins(const Dims& d, const BalanceOptions& options, const reference::Routing& routing, const Values& bias,
                   Counts& c) {
  const BinLayout<double> layout(options, bias.data(), d.experts);
  const double q = c.tokens * double(d.top_k) / double(d.experts);
  for (int64_t j = 0; j < d.experts; ++j) {
    const ExpertBins bins = layout.of(j);
    std::vector<int32_t> of_expert(size_t(options.bins), 0);
    for (double r : reference::margins_of(d, routing, j)) {
      const double t = (bins.coordinate(r) - bins.begin) * bins.per_unit();
      ++of_expert[size_t(std::clamp(t, 0.0, double(options.bins - 1)))];
    }
    c.histogram.insert(c.histogram.end(), of_expert.begin(), of_expert.end());
    c.next.push_back(quantile_of(bins, of_expert.data(), q, int64_t(c.tokens)).margin);
  }
  c.next = reference::centred(c.next);
}

Counts counts_of(const Dims& d, const BalanceOptions& options, const reference::Routing& routing, const Values& bias) {
  const Values zeros(size_t(d.experts), 0.0);
  Counts c{.load = zeros, .weight = zeros, .by_bias = zeros, .histogram = {}, .next = {}};
  for (int64_t i = 0; i < d.tokens; ++i) {
    if (routing.experts[size_t(i * d.top_k)] < 0) continue;
    ++c.tokens;
    const auto scores = routing.all_scores.begin() + i * d.experts;
    const auto order = reference::order_of(Values(scores, scores + d.experts));
    for (int64_t slot = i * d.top_k; slot < (i + 1) * d.top_k; ++slot) {
      const auto j = size_t(routing.experts[size_t(slot)]);
      ++c.load[j];
      c.weight[j] += routing.weights[size_t(slot)];
      c.by_bias[j] += std::find(order.begin(), order.begin() + d.top_k, j) == order.begin() + d.top_k ? 1 : 0;
    }
  }
  count_margins(d, options, routing, bias, c);
  return c;
}

std::vector<Tensor> outputs(const Dims& d, const BalanceOptions& options, const std::vector<Tensor>& in) {
  const auto want = reference::route(d, in[0].values, in[1].values);
  const Counts c = counts_of(d, options, want, in[1].values);
  constexpr auto kNone = GradientRule::none;
  std::vector<Tensor> out{{"experts", {d.tokens, d.top_k}, want.experts, kNone, DType::i32},
                          {"weights", {d.tokens, d.top_k}, want.weights, kNone},
                          {"scores", {d.tokens, d.top_k}, want.scores, kNone},
                          {"cutoff", {d.tokens}, want.cutoff, kNone},
                          {"invalid", {1}, {want.invalid}, kNone, DType::i64},
                          {"load", {d.experts}, c.load, kNone, DType::i64},
                          {"weight", {d.experts}, c.weight, kNone, DType::f64},
                          {"by bias", {d.experts}, c.by_bias, kNone, DType::i64},
                          {"histogram", {d.experts, options.bins}, c.histogram, kNone, DType::i32},
                          {"tokens", {1}, {c.tokens}, kNone, DType::i64},
                          {"next bias", {d.experts}, c.next, kNone}};
  for (Tensor& t : out) t.exact = true;
  return out;
}

}  // namespace

check::Case count_case(Dims d, BalanceOptions options) {
  return {.name = fmt::format("T {} E {} k {} {} counted in {} {} bins", d.tokens, d.experts, d.top_k,
                              d.score == Score::sigmoid ? "sigmoid" : "softmax", options.bins,
                              options.method == Balance::quantile_centred ? "centred" : "uniform"),
          .inputs = [=] { return inputs(d); },
          .reference = [=](const std::vector<Tensor>& in) { return outputs(d, options, in); },
          .run = [=](const check::Run& r) { run(d, options, r); },
          // In float32 a margin near an edge may count in the bin beside it: a few of thousands.
          .limit_f32 = 2e-2,
          .limit_bf16 = 2e-2};
}

}  // namespace tessera::ops::router
