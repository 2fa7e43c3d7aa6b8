#include "ops/attn_res/cases.h"

#include "ops/attn_res/op.h"
#include "ops/attn_res/reference.h"

namespace tessera::ops::attn_res {
namespace {

using check::GradientRule;
using check::Tensor;

constexpr int64_t kPeriod = 1 << 20;  // of values: a GPU's sizes would take minutes to make

// The tables hold the S sources first, then query and gain.
std::vector<View> sources_of(std::span<const View> views, const Dims& d) {
  return {views.begin(), views.begin() + d.sources};
}

void run(const Dims& d, const check::Run& r) {
  const bool backward_too = !r.d_outputs.empty();
  const size_t s = static_cast<size_t>(d.sources);
  Saved saved;
  if (backward_too) saved = allocate_saved(r.context, d, r.inputs[0].dtype());
  const Inputs in{sources_of(r.inputs, d), r.inputs[s], r.inputs[s + 1]};
  forward(r.context, d, in, {r.outputs[0]}, backward_too ? &saved : nullptr);
  if (!backward_too) return;
  backward(r.context, d, in, {r.outputs[0]}, saved, {r.d_outputs[0]},
           {sources_of(r.d_inputs, d), r.d_inputs[s], r.d_inputs[s + 1]});
}

struct Scales {
  double source = 1.0, query = 0.3;
};

std::vector<Tensor> inputs(const Dims& d, Scales scale) {
  std::vector<Tensor> in;
  for (int64_t s = 0; s < d.sources; ++s) {
    in.push_back(check::periodic_tensor(fmt::format("source {}", s), {d.tokens, d.width}, kPeriod, scale.source,
                                        GradientRule::add_activation));
  }
  in.push_back(check::random_tensor("query", {d.width}, scale.query, GradientRule::add));
  in.push_back(check::random_tensor("gain", {d.width}, 1.0, GradientRule::add));
  for (size_t i = in.size() - 2; i < in.size(); ++i) in[i].exact = true;
  return in;
}

std::vector<Tensor> reference_of(const Dims& d, const std::vector<Tensor>& in) {
  std::vector<std::vector<double>> sources;
  for (int64_t s = 0; s < d.sources; ++s) sources.push_back(in[size_t(s)].values);
  return {{"h",
           {d.tokens, d.width},
           reference::forward(d.tokens, d.width, d.eps, sources, in[sources.size()].values,
                              in[sources.size() + 1].values)}};
}

check::Case make_case(Dims d, Scales scale = {}, double limit_f32 = 1e-4) {
  return {.name = fmt::format("T {} D {} S {} source scale {} query scale {}", d.tokens, d.width, d.sources,
                              scale.source, scale.query),
          .inputs = [=] { return inputs(d, scale); },
          .reference = [=](const std::vector<Tensor>& in) { return reference_of(d, in); },
          .run = [=](const check::Run& r) { run(d, r); },
          .limit_f32 = limit_f32,
          .limit_bf16 = d.tokens * d.width == 1 ? 4e-3 : 2.5e-3,  // the largest rounding; the mean one of many elements
          // A source's gradient may be small beside what it is added to, and the sum's rounding is relative to both.
          .limit_bf16_gradient = 1e-2};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("T {} D {} S {}", d.tokens, d.width, d.sources),
          .inputs = [=] { return inputs(d, {}); },
          .output_shapes = {{d.tokens, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "attn_res",
      .cases = {make_case({0, 8, 3, 1e-5}), make_case({1, 1, 2, 1e-5}), make_case({1, 64, 4, 1e-5}),
                make_case({17, 33, 5, 1e-6}), make_case({70, 48, 2, 1e-5}), make_case({5, 16, 11, 1e-5}),
                make_case({33, 24, 1, 1e-5}),
                make_case({9, 32, 4, 1e-5},
                          {.source = 1e-3}),  // near the eps floor, where a wrong place of eps would show
                make_case({9, 32, 4, 1e-5}, {.source = 1e3}),
                // Softmax nearly one-hot; a backward through <G, v> - <G, h> is off by 1e-4.
                make_case({9, 64, 4, 1e-5}, {.query = 3.0}, 2e-5)},
      .speed = {make_speed({8192, 512, 4, 1e-5})},
      // Tokens of several warps, of two pieces a thread, and narrower than their threads; several tokens a block.
      .cuda_cases = {make_case({5000, 64, 3, 1e-5}), make_case({700, 1000, 7, 1e-5}),
                     make_case({30, 4104, 6, 1e-5}, {.query = 0.02}), make_case({9, 2305, 70, 1e-5}, {.query = 0.02}),
                     make_case({300, 264, 2, 1e-5}), make_case({300, 264, 4, 1e-5}), make_case({300, 264, 8, 1e-5})},
      .cuda_speed = {make_speed({65536, 1280, 2, 1e-5}), make_speed({65536, 1280, 4, 1e-5}),
                     make_speed({65536, 1280, 7, 1e-5})}};
  return t;
}

}  // namespace tessera::ops::attn_res
