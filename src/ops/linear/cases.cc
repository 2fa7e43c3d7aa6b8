#include "ops/linear/cases.h"

#include "ops/linear/op.h"
#include "ops/linear/reference.h"

namespace tessera::ops::linear {
namespace {

using check::GradientRule;
using check::Tensor;

void run(const Dims& d, bool add_to_x, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1]};
  forward(r.context, d, in, {r.outputs[0]});
  if (!r.d_outputs.empty()) backward(r.context, d, in, {r.d_outputs[0]}, {r.d_inputs[0], add_to_x, r.d_inputs[1]});
}

std::vector<Tensor> inputs(const Dims& d, bool add_to_x) {
  return {check::random_tensor("x", {d.tokens, d.in}, 1.0, add_to_x ? GradientRule::add : GradientRule::overwrite),
          check::random_tensor("weight", {d.out, d.in}, 0.1, GradientRule::add)};
}

check::Case make_case(Dims d, bool add_to_x = false) {
  return {.name = fmt::format("T {} in {} out {}{}", d.tokens, d.in, d.out, add_to_x ? " adding to dx" : ""),
          .inputs = [=] { return inputs(d, add_to_x); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{
                    {"y", {d.tokens, d.out}, reference::forward(d.tokens, d.in, d.out, in[0].values, in[1].values)}};
              },
          .run = [=](const check::Run& r) { run(d, add_to_x, r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("T {} in {} out {}", d.tokens, d.in, d.out),
          .inputs = [=] { return inputs(d, false); },
          .output_shapes = {{d.tokens, d.out}},
          .run = [=](const check::Run& r) { run(d, false, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "linear",
      .cases = {make_case({0, 8, 4}), make_case({1, 1, 1}), make_case({1, 64, 48}), make_case({17, 33, 7}),
                make_case({65, 16, 129}, true), make_case({128, 48, 64})},
      .speed = {make_speed({8192, 512, 512}), make_speed({8192, 128, 128}), make_speed({2048, 512, 2048})}};
  return t;
}

}  // namespace tessera::ops::linear
