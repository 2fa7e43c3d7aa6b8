#include "ops/glu/cases.h"

#include "ops/glu/op.h"
#include "ops/glu/reference.h"

namespace tessera::ops::glu {
namespace {

using check::Tensor;

constexpr Activation kSwiGlu{.kind = Kind::swiglu};
constexpr Activation kSitu{.kind = Kind::situ};
constexpr Activation kLinearUp{.kind = Kind::situ, .up_cap = 0};

void run(const Dims& d, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1]};
  forward(r.context, d, in, {r.outputs[0]});
  if (!r.d_outputs.empty()) backward(r.context, d, in, {r.d_outputs[0]}, {r.d_inputs[0], r.d_inputs[1]});
}

std::vector<Tensor> inputs(const Dims& d, double scale) {
  return {check::random_tensor("gate", {d.rows, d.width}, scale), check::random_tensor("up", {d.rows, d.width}, scale)};
}

std::string name_of(const Activation& a) {
  return a.kind == Kind::swiglu ? "SwiGLU" : fmt::format("SiTU {} {}", a.gate_cap, a.up_cap);
}

check::Case make_case(Dims d, double scale = 1.0) {
  return {.name = fmt::format("R {} W {} {} scale {}", d.rows, d.width, name_of(d.activation), scale),
          .inputs = [=] { return inputs(d, scale); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{
                    {"h", {d.rows, d.width}, reference::forward(d.activation, in[0].values, in[1].values)}};
              },
          .run = [=](const check::Run& r) { run(d, r); },
          .limit_f32 = 1e-6};  // a few ulp an element, no sums
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("R {} W {} {}", d.rows, d.width, name_of(d.activation)),
          .inputs = [=] { return inputs(d, 1.0); },
          .output_shapes = {{d.rows, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "glu",
      // Scale 30: both caps and the sigmoid saturated. Scale 1e-4: where 1 - exp(-2x) would cancel.
      .cases = {make_case({0, 8, kSitu}), make_case({1, 1, kSitu}), make_case({1, 1, kSwiGlu}),
                make_case({17, 33, kSitu}), make_case({17, 33, kSwiGlu}), make_case({17, 33, kLinearUp}),
                make_case({9, 64, kSitu}, 30), make_case({9, 64, kSwiGlu}, 30), make_case({9, 64, kSitu}, 1e-4),
                make_case({130, 127, {.kind = Kind::situ, .gate_cap = 2.5, .up_cap = 7}}, 3)},
      .speed = {make_speed({8192, 2048, kSitu}), make_speed({8192, 2048, kSwiGlu})}};
  return t;
}

}  // namespace tessera::ops::glu
