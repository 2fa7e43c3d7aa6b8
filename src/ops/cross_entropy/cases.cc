// The op's gradient is that of scale * (sum of losses), so the table's second output is that sum: the gradient handed
// to it is the scale, and central differences of the definition check it as for any other op.
#include "ops/cross_entropy/cases.h"

#include <numeric>

#include "core/philox.h"
#include "ops/cross_entropy/op.h"
#include "ops/cross_entropy/reference.h"

namespace tessera::ops::cross_entropy {
namespace {

using check::GradientRule;
using check::Tensor;

// The loss of every token lies where the op ran; the sum is the table's own and is taken on the host.
template <class Real>
void sum_losses(const View& loss, const View& total) {
  std::vector<Real> host(static_cast<size_t>(loss.elements()));
  copy(loss, View(host.data(), loss.dtype(), loss.shape()));
  Real sum = std::accumulate(host.begin(), host.end(), Real(0));
  copy(View(&sum, total.dtype(), total.shape()), total);
}

double scale_of(const View& d_total) {
  double scale = 0;
  dispatch_real(d_total.dtype(), [&](auto real) {
    copy(d_total, View(&real, d_total.dtype(), d_total.shape()));
    scale = double(real);
  });
  return scale;
}

void run(const Dims& d, const check::Run& r) {
  const Inputs in{r.inputs[0], r.inputs[1], r.inputs[2]};
  const View &loss = r.outputs[0], &total = r.outputs[1];
  if (r.d_outputs.empty()) {
    forward(r.context, d, in, {loss});
  } else {
    const double scale = r.context.dry() ? 1.0 : scale_of(r.d_outputs[1]);
    forward_backward(r.context, d, in, scale, {loss}, {r.d_inputs[0], r.d_inputs[1]});
  }
  if (!r.context.dry()) dispatch_real(loss.dtype(), [&](auto real) { sum_losses<decltype(real)>(loss, total); });
}

// Every `masked`-th token has no target (0: all have one); the vocabulary's first and last are among the others.
Tensor targets(const Dims& d, int64_t masked) {
  Tensor t{"targets", {d.tokens}, {}, GradientRule::none, DType::i32};
  const Philox philox(23, Purpose::test);
  for (int64_t i = 0; i < d.tokens; ++i) {
    const uint64_t bits = philox.bits(static_cast<uint64_t>(i));
    t.values.push_back(masked > 0 && i % masked == 0 ? -1.0 : double(bits % static_cast<uint64_t>(d.vocabulary)));
  }
  if (d.tokens > 2 && masked != 1) {
    t.values[1] = 0;
    t.values[2] = static_cast<double>(d.vocabulary - 1);
  }
  return t;
}

struct Options {
  int64_t masked = 0;
  double x_scale = 1.0;
};

std::vector<Tensor> inputs(const Dims& d, Options o) {
  return {check::random_tensor("x", {d.tokens, d.width}, o.x_scale),
          check::random_tensor("weight", {d.vocabulary, d.width}, 1.0, GradientRule::add), targets(d, o.masked)};
}

std::vector<Tensor> reference_of(const Dims& d, const std::vector<Tensor>& in) {
  const auto loss = reference::forward(d.tokens, d.width, d.vocabulary, in[0].values, in[1].values, in[2].values);
  const double total = std::accumulate(loss.begin(), loss.end(), 0.0);
  std::vector<Tensor> out{{"loss", {d.tokens}, loss, GradientRule::none}, {"total", {1}, {total}}};
  for (Tensor& t : out) t.exact = true;
  return out;
}

std::string shape_name(const Dims& d) {
  return fmt::format("T {} D {} vocabulary {} block {}", d.tokens, d.width, d.vocabulary, d.block_rows);
}

check::Case make_case(Dims d, Options o = {}) {
  return {.name = fmt::format("{} masked {} x scale {}", shape_name(d), o.masked, o.x_scale),
          .inputs = [=] { return inputs(d, o); },
          .reference = [=](const std::vector<Tensor>& in) { return reference_of(d, in); },
          .run = [=](const check::Run& r) { run(d, r); },
          .limit_bf16 = 1e-4};  // logits of operands in bf16 are float32, and nothing is rounded from there to the loss
}

check::SpeedCase make_speed(Dims d) {
  return {.name = shape_name(d),
          .inputs = [=] { return inputs(d, Options{}); },
          .output_shapes = {{d.tokens}, {1}},
          .run = [=](const check::Run& r) { run(d, r); },
          .exact_outputs = {0, 1}};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "cross_entropy",
      // Blocks of 1, that divide T, that leave a short last block, and larger than T; half and all tokens without a
      // target; x of scale 30: softmax nearly one-hot.
      .cases = {make_case({0, 8, 5, 4}), make_case({1, 1, 1, 4}), make_case({1, 16, 33, 1024}),
                make_case({7, 16, 33, 1}), make_case({12, 8, 257, 4}), make_case({13, 8, 257, 4}, {.masked = 2}),
                make_case({9, 8, 50, 4}, {.masked = 1}), make_case({13, 8, 31, 5}, {.x_scale = 30.0})},
      .speed = {make_speed({8192, 128, 272}), make_speed({2048, 512, 32000})},
      // Rows longer than the GPU takes in one go, that it can and cannot read eight at a time.
      .cuda_cases = {make_case({150, 64, 9000, 64}, {.masked = 3}), make_case({20, 16, 40003, 16}, {.x_scale = 3.0})}};
  return t;
}

}  // namespace tessera::ops::cross_entropy
