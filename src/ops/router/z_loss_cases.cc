// Backward is that of scale * (sum of losses), so the table's second output is that sum and the gradient handed to it
// is the scale. Another gradient lies in dlogits before, which the rule `add` stands for.
#include <numeric>

#include "core/host_copy.h"
#include "ops/router/cases.h"
#include "ops/router/reference.h"
#include "ops/router/z_loss.h"

namespace tessera::ops::router::z_loss {
namespace {

using check::GradientRule;
using check::Tensor;

template <class Real>
void run_on(const Dims& d, const check::Run& r) {
  forward(r.context, d, {r.inputs[0]}, {r.outputs[0]});
  const bool dry = r.context.dry();
  if (!r.d_outputs.empty()) {
    const double scale = dry ? 1.0 : double(*HostCopy(r.d_outputs[1]).as<Real>());
    backward(r.context, d, {r.inputs[0]}, scale, {r.d_inputs[0]});
  }
  if (dry) return;
  const HostCopy losses(r.outputs[0]), total(r.outputs[1]);
  const Real* loss = losses.as<Real>();
  *total.as<Real>() = std::accumulate(loss, loss + d.tokens, Real(0));
  total.put_back();
}

void run(const Dims& d, const check::Run& r) {
  dispatch_real(r.inputs[0].dtype(), [&](auto real) { run_on<decltype(real)>(d, r); });
}

std::vector<Tensor> inputs(const Dims& d, double scale) {
  Tensor logits = check::random_tensor("logits", {d.tokens, d.experts}, scale, GradientRule::add);
  logits.exact = true;
  return {logits};
}

std::vector<Tensor> outputs(const Dims& d, const std::vector<Tensor>& in) {
  const auto loss = reference::z_loss(d.tokens, d.experts, in[0].values);
  const double total = std::accumulate(loss.begin(), loss.end(), 0.0);
  std::vector<Tensor> out{{"loss", {d.tokens}, loss, GradientRule::none}, {"total", {1}, {total}}};
  for (Tensor& t : out) t.exact = true;
  return out;
}

check::Case make_case(Dims d, double scale = 1.5) {
  return {.name = fmt::format("T {} E {} logits x {}", d.tokens, d.experts, scale),
          .inputs = [=] { return inputs(d, scale); },
          .reference = [=](const std::vector<Tensor>& in) { return outputs(d, in); },
          .run = [=](const check::Run& r) { run(d, r); }};
}

check::SpeedCase make_speed(Dims d) {
  return {.name = fmt::format("T {} E {}", d.tokens, d.experts),
          .inputs = [=] { return inputs(d, 1.5); },
          .output_shapes = {{d.tokens}, {1}},
          .run = [=](const check::Run& r) { run(d, r); },
          .exact_outputs = {0, 1}};
}

}  // namespace

const check::OpTable& table() {
  static const check::OpTable t{
      .op = "router_z_loss",
      // One expert: lse is the logit. Logits x 40: the softmax is one-hot and exp of a logit overflows.
      .cases = {make_case({0, 8}), make_case({1, 1}), make_case({1, 8}), make_case({33, 64}), make_case({17, 33}),
                make_case({9, 896}), make_case({13, 24}, 40)},
      .speed = {make_speed({8192, 64}), make_speed({8192, 896})}};
  return t;
}

}  // namespace tessera::ops::router::z_loss
