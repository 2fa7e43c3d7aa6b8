#include "ops/rms_norm/cases.h"

#include "ops/rms_norm/op.h"
#include "ops/rms_norm/reference.h"

namespace tessera::ops::rms_norm {
namespace {

using check::GradientRule;
using check::Tensor;

constexpr int64_t kPeriod = 1 << 20;  // of values: a GPU's sizes would take minutes to make

void run(const Dims& d, const check::Run& r) {
  const bool backward_too = !r.d_outputs.empty();
  Saved saved;
  if (backward_too) saved = allocate_saved(r.context, d, r.inputs[0].dtype());
  const Inputs in{r.inputs[0], r.inputs[1]};
  forward(r.context, d, in, {r.outputs[0]}, backward_too ? &saved : nullptr);
  if (backward_too) backward(r.context, d, in, saved, {r.d_outputs[0]}, {r.d_inputs[0], r.d_inputs[1]});
}

Tensor weight(const Dims& d) {
  Tensor t = check::random_tensor("weight", {d.width}, 1.0, GradientRule::add);
  t.exact = true;
  return t;
}

std::vector<Tensor> inputs(const Dims& d, double scale) {
  return {check::periodic_tensor("x", {d.rows, d.width}, kPeriod, scale), weight(d)};
}

check::Case make_case(Dims d, double scale = 1.0) {
  return {.name = fmt::format("R {} W {} scale {}", d.rows, d.width, scale),
          .inputs = [=] { return inputs(d, scale); },
          .reference =
              [=](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{
                    {"y", {d.rows, d.width}, reference::forward(d.rows, d.width, d.eps, in[0].values, in[1].values)}};
              },
          .run = [=](const check::Run& r) { run(d, r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("R {} W {}", d.rows, d.width),
          .inputs = [=] { return inputs(d, 1.0); },
          .output_shapes = {{d.rows, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "rms_norm",
      // 1e-3: rows near the eps floor, where a wrong place of eps would show.
      .cases = {make_case({0, 8, 1e-5}), make_case({1, 2, 1e-5}), make_case({1, 128, 1e-5}), make_case({17, 33, 1e-5}),
                make_case({64, 128, 1e-6}), make_case({130, 16, 1e-5}, 1e-3), make_case({5, 64, 1e-5}, 1e3)},
      .speed = {make_speed({8192, 512, 1e-5}), make_speed({65536, 128, 1e-5})},
      .cuda_speed = {make_speed({65536, 1280, 1e-5})}};
  return t;
}

}  // namespace tessera::ops::rms_norm
