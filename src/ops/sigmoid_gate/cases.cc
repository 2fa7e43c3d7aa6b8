#include "ops/sigmoid_gate/cases.h"

#include "ops/sigmoid_gate/op.h"
#include "ops/sigmoid_gate/reference.h"

namespace tessera::ops::sigmoid_gate {
namespace {

using check::Tensor;

void run(const Dims& d, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1]};
  forward(r.context, d, in, {r.outputs[0]});
  if (!r.d_outputs.empty()) backward(r.context, d, in, {r.d_outputs[0]}, {r.d_inputs[0], r.d_inputs[1]});
}

std::vector<Tensor> inputs(const Dims& d, double gate_scale) {
  return {check::random_tensor("x", {d.rows, d.width}), check::random_tensor("w", {d.rows, d.width}, gate_scale)};
}

check::Case make_case(Dims d, double gate_scale = 1.0) {
  return {.name = fmt::format("R {} W {} gate scale {}", d.rows, d.width, gate_scale),
          .inputs = [=] { return inputs(d, gate_scale); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{{"y", {d.rows, d.width}, reference::forward(in[0].values, in[1].values)}};
              },
          .run = [=](const check::Run& r) { run(d, r); },
          .limit_bf16 = d.rows * d.width == 1 ? 4e-3 : 2.5e-3};  // the largest rounding; the mean one of many elements
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("R {} W {}", d.rows, d.width),
          .inputs = [=] { return inputs(d, 1.0); },
          .output_shapes = {{d.rows, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{.op = "sigmoid_gate",
                                // Gates of scale 8: most of the sigmoids lie in their tails.
                                .cases = {make_case({0, 8}), make_case({1, 1}), make_case({5, 33}),
                                          make_case({130, 257}), make_case({17, 64}, 8.0)},
                                .speed = {make_speed({8192, 512})}};
  return t;
}

}  // namespace tessera::ops::sigmoid_gate
