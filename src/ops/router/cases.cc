#include "ops/router/cases.h"

#include <algorithm>
#include <numeric>

#include "core/philox.h"
#include "ops/router/reference.h"
#include "ops/router/scores.h"

namespace tessera::ops::router {
namespace {

using check::GradientRule;
using check::Tensor;

void run(const Dims& d, const check::Run& r) {
  Outputs out{r.outputs[0], r.outputs[1], r.outputs[2], r.outputs[3], r.outputs[4]};
  if (needs_all_scores(d)) out.all_scores = r.outputs[5];
  out.invalid.zero();
  forward(r.context, d, {r.inputs[0], r.inputs[1]}, out);
  if (!r.d_outputs.empty()) backward(r.context, d, out, {r.d_outputs[1]}, {r.d_inputs[0]});
}

std::vector<Tensor> inputs(const Dims& d) {
  Tensor bias = check::random_tensor("bias", {d.experts}, 0.02, GradientRule::none);
  for (double& b : bias.values) b = std::clamp(b, -0.05, 0.05);
  Tensor logits = check::random_tensor("logits", {d.tokens, d.experts}, 1.5);
  if (d.score == Score::sigmoid) logits.values = separated_logits(d.tokens, bias.values, 1);
  bias.exact = logits.exact = true;
  return {logits, bias};
}

std::vector<Tensor> outputs(const Dims& d, const std::vector<Tensor>& in) {
  const auto want = reference::route(d, in[0].values, in[1].values);
  std::vector<Tensor> out{{"experts", {d.tokens, d.top_k}, want.experts, GradientRule::none, DType::i32},
                          {"weights", {d.tokens, d.top_k}, want.weights},
                          {"scores", {d.tokens, d.top_k}, want.scores, GradientRule::none},
                          {"cutoff", {d.tokens}, want.cutoff, GradientRule::none},
                          {"invalid", {1}, {want.invalid}, GradientRule::none, DType::i64}};
  if (needs_all_scores(d)) out.push_back({"all_scores", {d.tokens, d.experts}, want.all_scores, GradientRule::none});
  for (Tensor& t : out) t.exact = true;
  return out;
}

check::Case make_case(Dims d) {
  return {.name = fmt::format("T {} E {} k {} {}{} groups {}/{} scale {}", d.tokens, d.experts, d.top_k,
                              d.score == Score::sigmoid ? "sigmoid" : "softmax", renormalised(d) ? " to R" : "",
                              d.top_groups, d.groups, d.scale),
          .inputs = [=] { return inputs(d); },
          .reference = [=](const std::vector<Tensor>& in) { return outputs(d, in); },
          .run = [=](const check::Run& r) { run(d, r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("T {} E {} k {}", d.tokens, d.experts, d.top_k),
          .inputs =
              [=] {
                std::vector<Tensor> in{check::random_tensor("logits", {d.tokens, d.experts}, 1.5),
                                       check::random_tensor("bias", {d.experts}, 0.02, GradientRule::none)};
                in[0].exact = in[1].exact = true;
                return in;
              },
          .output_shapes = {},
          .run =
              [=](const check::Run& r) {
                // The outputs are of other types than the harness's own, so they come from the arena.
                Arena& arena = r.context.arena;
                const DType dtype = r.inputs[0].dtype();
                const Shape selected{d.tokens, d.top_k};
                const Outputs out{arena.allocate(DType::i32, selected), arena.allocate(dtype, selected),
                                  arena.allocate(dtype, selected), arena.allocate(dtype, {d.tokens}),
                                  arena.allocate_zeroed(DType::i64, {1})};
                forward(r.context, d, {r.inputs[0], r.inputs[1]}, out);
                if (!r.d_inputs.empty()) backward(r.context, d, out, {out.weights}, {r.d_inputs[0]});
              }};
}

}  // namespace

std::vector<double> separated_logits(int64_t tokens, const std::vector<double>& bias, uint64_t seed) {
  const size_t experts = bias.size();
  const Philox philox(seed, Purpose::test);
  std::vector<double> logits;
  std::vector<size_t> rank(experts);
  for (uint64_t i = 0; i < uint64_t(tokens); ++i) {
    std::iota(rank.begin(), rank.end(), size_t{0});
    for (size_t j = experts; j > 1; --j) std::swap(rank[j - 1], rank[philox.bits(i * experts + j) % j]);
    for (size_t j = 0; j < experts; ++j) {
      const double jitter = philox.uniform((uint64_t{1} << 40) + i * experts + j) / 2;
      const double s = 0.1 + 0.8 * (double(rank[j]) + jitter) / double(experts) - bias[j];
      logits.push_back(std::log(s / (1 - s)));
    }
  }
  return logits;
}

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "router",
      .cases = {make_case({0, 8, 2}), make_case({1, 1, 1}), make_case({1, 8, 2}), make_case({5, 4, 4}),
                make_case({33, 64, 6}), make_case({17, 33, 1}), make_case({17, 33, 5, 2.5}),
                make_case({65, 31, 4, 1.5, false}), make_case({9, 896, 16}), make_case({7, 300, 30}),
                make_case({19, 24, 3, 1, true, Score::softmax}), make_case({19, 24, 3, 2.5, false, Score::softmax}),
                make_case({11, 16, 1, 1, true, Score::softmax}), make_case({21, 32, 4, 1, true, Score::sigmoid, 8, 3}),
                make_case({21, 12, 4, 2, true, Score::sigmoid, 6, 2}),
                make_case({13, 8, 2, 1, true, Score::sigmoid, 8, 4}), count_case({300, 24, 3}, {}),
                count_case({200, 42, 4, 1, true, Score::softmax}, {.method = Balance::quantile_uniform, .bins = 1000}),
                count_case({120, 896, 16}, {.min_tokens = 1})},
      .speed = {make_speed({8192, 64, 6}), make_speed({8192, 896, 16})}};
  return t;
}

}  // namespace tessera::ops::router
