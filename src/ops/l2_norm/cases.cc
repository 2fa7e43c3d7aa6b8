#include "ops/l2_norm/cases.h"

#include "ops/l2_norm/op.h"
#include "ops/l2_norm/reference.h"

namespace tessera::ops::l2_norm {
namespace {

using check::Tensor;

void run(const Dims& d, const check::Run& r) {
  const bool backward_too = !r.d_outputs.empty();
  Saved saved;
  if (backward_too) saved = allocate_saved(r.context, d, r.inputs[0].dtype());
  forward(r.context, d, {r.inputs[0]}, {r.outputs[0]}, backward_too ? &saved : nullptr);
  if (backward_too) backward(r.context, d, {r.outputs[0]}, saved, {r.d_outputs[0]}, {r.d_inputs[0]});
}

// Every third row zero where `zero_rows`: y = 0 there, and the gradient is 1000 dy.
Tensor input(const Dims& d, double scale, bool zero_rows) {
  Tensor x = check::random_tensor("x", {d.rows, d.width}, scale);
  for (int64_t r = 0; zero_rows && r < d.rows; r += 3) {
    for (int64_t i = 0; i < d.width; ++i) x.values[size_t(r * d.width + i)] = 0;
  }
  return x;
}

check::Case make_case(Dims d, double scale = 1.0, bool zero_rows = false) {
  return {.name = fmt::format("R {} W {} scale {}{}", d.rows, d.width, scale, zero_rows ? " zero rows" : ""),
          .inputs = [=] { return std::vector<Tensor>{input(d, scale, zero_rows)}; },
          .reference =
              [=](const std::vector<Tensor>& in) {
                return std::vector<Tensor>{
                    {"y", {d.rows, d.width}, reference::forward(d.rows, d.width, kEpsilon, in[0].values)}};
              },
          .run = [=](const check::Run& r) { run(d, r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("R {} W {}", d.rows, d.width),
          .inputs = [=] { return std::vector<Tensor>{input(d, 1.0, false)}; },
          .output_shapes = {{d.rows, d.width}},
          .run = [=](const check::Run& r) { run(d, r); }};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "l2_norm",
      // 1e-3 and 1e-4: rows near the epsilon, where a wrong place of it would show.
      .cases = {make_case({0, 8}), make_case({1, 2}), make_case({1, 128}), make_case({17, 33}), make_case({260, 128}),
                make_case({130, 16}, 1e-3), make_case({9, 32}, 1e-4), make_case({10, 24}, 1e-3, true),
                make_case({5, 64}, 1e4)},
      .speed = {make_speed({65536, 128})},
      .cuda_cases = {make_case({70, 256}), make_case({37, 1024}), make_case({5, 1001})}};  // the wider groups
  return t;
}

}  // namespace tessera::ops::l2_norm
