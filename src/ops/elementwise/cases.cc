#include "ops/elementwise/cases.h"

#include "ops/elementwise/op.h"
#include "ops/elementwise/reference.h"

namespace tessera::ops::elementwise {
namespace {

using check::GradientRule;
using check::Tensor;

// sum = a + b, then b + sum over the sum's own memory and a added to it: all three ways in which y may meet an operand.
void run(const check::Run& r) {
  const View &a = r.inputs[0], &b = r.inputs[1];
  add(r.context, a, b, r.outputs[0]);
  add(r.context, a, b, r.outputs[1]);
  add(r.context, b, r.outputs[1], r.outputs[1]);
  add_to(r.context, a, r.outputs[1]);
}

std::vector<Tensor> inputs(int64_t rows, int64_t width) {
  return {check::random_tensor("a", {rows, width}, 1.0, GradientRule::none),
          check::random_tensor("b", {rows, width}, 1.0, GradientRule::none)};
}

check::Case make_case(int64_t rows, int64_t width) {
  return {.name = fmt::format("R {} W {}", rows, width),
          .inputs = [=] { return inputs(rows, width); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                const auto sum = reference::add(in[0].values, in[1].values);
                return std::vector<Tensor>{{"sum", {rows, width}, sum},
                                           {"twice the sum", {rows, width}, reference::add(sum, sum)}};
              },
          .run = run,
          .limit_bf16 = 4e-3};  // three sums, each rounded
}

check::SpeedCase make_speed(int64_t rows, int64_t width) {
  return {.name = fmt::format("R {} W {}", rows, width),
          .inputs = [=] { return inputs(rows, width); },
          .output_shapes = {{rows, width}},
          .run = [](const check::Run& r) { add(r.context, r.inputs[0], r.inputs[1], r.outputs[0]); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{.op = "elementwise",
                                // 300 x 257: several threads and a rest behind the last vector.
                                .cases = {make_case(0, 8), make_case(1, 1), make_case(3, 17), make_case(300, 257)},
                                .speed = {make_speed(8192, 512)}};
  return t;
}

}  // namespace tessera::ops::elementwise
