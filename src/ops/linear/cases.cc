#include "ops/linear/cases.h"

#include "ops/linear/op.h"
#include "ops/linear/reference.h"

namespace tessera::ops::linear {
namespace {

using check::GradientRule;
using check::Tensor;

constexpr int64_t kPeriod = 1 << 20;  // of values: a GPU's sizes would take minutes to make

struct Options {
  bool add_to_x = false;
  bool exact = false;  // weight and y, as the router has them
};

void run(const Dims& d, Options o, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1]};
  forward(r.context, d, in, {r.outputs[0]});
  if (!r.d_outputs.empty()) backward(r.context, d, in, {r.d_outputs[0]}, {r.d_inputs[0], o.add_to_x, r.d_inputs[1]});
}

std::vector<Tensor> inputs(const Dims& d, Options o) {
  std::vector<Tensor> in{check::periodic_tensor("x", {d.tokens, d.in}, kPeriod, 1.0,
                                                o.add_to_x ? GradientRule::add_activation : GradientRule::overwrite),
                         check::random_tensor("weight", {d.out, d.in}, 0.1, GradientRule::add)};
  in[1].exact = o.exact;
  return in;
}

std::vector<Tensor> reference_of(const Dims& d, bool exact, const std::vector<Tensor>& in) {
  Tensor y{"y", {d.tokens, d.out}, reference::forward(d.tokens, d.in, d.out, in[0].values, in[1].values)};
  y.exact = exact;
  return {y};
}

check::Case make_case(Dims d, Options o = {}) {
  check::Case c{.name = fmt::format("T {} in {} out {}{}{}", d.tokens, d.in, d.out, o.add_to_x ? " adding to dx" : "",
                                    o.exact ? " exact weight" : ""),
                .inputs = [=] { return inputs(d, o); },
                .reference = [=](const std::vector<Tensor>& in) { return reference_of(d, o.exact, in); },
                .run = [=](const check::Run& r) { run(d, o, r); }};
  if (o.exact) c.limit_bf16 = c.limit_f32;  // nothing is rounded on the way to y
  return c;
}

// x, y and their gradients are column ranges of wider matrices: x -> hidden -> y, with hidden and its gradient inside.
check::Case make_strided(Dims d, int64_t wide, int64_t begin) {
  const Dims first{d.tokens, d.in, d.in};
  const auto run_both = [=](const check::Run& r) {
    Arena& arena = r.context.arena;
    const View x = r.inputs[0], w1 = r.inputs[1], w2 = r.inputs[2];
    const View hidden = arena.allocate(x.dtype(), {d.tokens, wide}).column_range(begin, d.in);
    forward(r.context, first, {x, w1}, {hidden});
    forward(r.context, d, {hidden, w2}, {r.outputs[0]});
    if (r.d_outputs.empty()) return;
    const View dhidden = arena.allocate(x.dtype(), {d.tokens, wide}).column_range(begin, d.in);
    backward(r.context, d, {hidden, w2}, {r.d_outputs[0]}, {dhidden, false, r.d_inputs[2]});
    backward(r.context, first, {x, w1}, {dhidden}, {r.d_inputs[0], false, r.d_inputs[1]});
  };
  return {.name = fmt::format("T {} in {} out {} through columns {} of {}", d.tokens, d.in, d.out, begin, wide),
          .inputs =
              [=] {
                std::vector<Tensor> in = inputs(d, {});
                in.insert(in.begin() + 1, check::random_tensor("first", {d.in, d.in}, 0.1, GradientRule::add));
                return in;
              },
          .reference =
              [=](const std::vector<Tensor>& in) {
                const auto h = reference::forward(d.tokens, d.in, d.in, in[0].values, in[1].values);
                return std::vector<Tensor>{
                    {"y", {d.tokens, d.out}, reference::forward(d.tokens, d.in, d.out, h, in[2].values)}};
              },
          .run = run_both,
          .limit_bf16 = 5e-3,  // two products one after another, each rounded
          .limit_bf16_gradient = 6e-3};
}

// Logits for sampling: exact y beside a weight of the type of x, no gradient.
check::Case make_logits(Dims d) {
  return {.name = fmt::format("T {} in {} out {} exact y", d.tokens, d.in, d.out),
          .inputs =
              [=] {
                std::vector<Tensor> in = inputs(d, {});
                for (Tensor& t : in) t.gradient = GradientRule::none;
                return in;
              },
          .reference = [=](const std::vector<Tensor>& in) { return reference_of(d, true, in); },
          .run =
              [=](const check::Run& r) {
                forward(r.context, d, {r.inputs[0], r.inputs[1]}, {r.outputs[0]});
              },
          .limit_bf16 = 1e-4};
}

check::SpeedCase make_speed(Dims d, Options o = {}) {
  return {.name = fmt::format("T {} in {} out {}{}", d.tokens, d.in, d.out, o.exact ? " exact weight" : ""),
          .inputs = [=] { return inputs(d, o); },
          .output_shapes = {{d.tokens, d.out}},
          .run = [=](const check::Run& r) { run(d, o, r); },
          .exact_outputs = o.exact ? std::vector<size_t>{0} : std::vector<size_t>{}};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "linear",
      .cases = {make_case({0, 8, 4}), make_case({1, 1, 1}), make_case({1, 64, 48}), make_case({17, 33, 7}),
                make_case({65, 16, 129}, {.add_to_x = true}), make_case({128, 48, 64}),
                make_case({0, 16, 8}, {.exact = true}), make_case({37, 40, 24}, {.exact = true}),
                make_case({33, 19, 5}, {.add_to_x = true, .exact = true})},
      .speed = {make_speed({8192, 512, 512}), make_speed({8192, 128, 128}), make_speed({2048, 512, 2048})},
      // More rows than are split at a time; rows that cannot be read eight at a time; long sums, which may be split.
      .cuda_cases = {make_case({16400, 64, 20}, {.add_to_x = true, .exact = true}),
                     make_strided({130, 64, 48}, 160, 32), make_strided({29, 24, 8}, 77, 13),
                     make_logits({70, 96, 130}), make_case({4096, 256, 128})},
      .cuda_speed = {make_speed({65536, 1280, 1280}), make_speed({65536, 1280, 116}, {.exact = true})}};
  return t;
}

}  // namespace tessera::ops::linear
