#include "ops/mla/cases.h"

#include <fmt/format.h>

#include "ops/mla/op.h"
#include "ops/mla/reference.h"

namespace tessera::ops::mla {
namespace {

using check::GradientRule;
using check::Tensor;

constexpr double kMaxLogitBefore = 0.5;  // of QK-clip's maximum: the op raises it

struct HeadShape {
  int64_t heads, nope_dim, rope_dim, value_dim;
};

Dims dims_of(const HeadShape& s, const std::vector<int64_t>& offsets) {
  return {offsets.back(), s.heads, s.nope_dim, s.rope_dim, s.value_dim};
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets{0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

void run(const Dims& d, const Documents& documents, const check::Run& r) {
  const bool backward_too = !r.d_outputs.empty();
  Saved saved;
  if (backward_too) saved = allocate_saved(r.context, d, r.inputs[0].dtype());
  const Inputs in{r.inputs[0], r.inputs[1], r.inputs[2], documents};
  Outputs out{r.outputs[0], {}};
  if (r.outputs.size() > 1) {
    out.max_logit = r.outputs[1];
    if (!r.context.dry()) {
      dispatch_real(out.max_logit.dtype(), [&](auto real) {
        using Real = decltype(real);
        std::fill_n(out.max_logit.as<Real>(), d.heads, Real(kMaxLogitBefore));
      });
    }
  }
  forward(r.context, d, in, out, backward_too ? &saved : nullptr);
  if (!backward_too) return;
  backward(r.context, d, in, out, saved, {r.d_outputs[0]}, {r.d_inputs[0], r.d_inputs[1], r.d_inputs[2]});
}

std::vector<Tensor> inputs(const Dims& d, double scale) {
  return {check::random_tensor("q", {d.tokens, d.heads, d.nope_dim + d.rope_dim}, scale),
          check::random_tensor("kv", {d.tokens, d.heads, d.nope_dim + d.value_dim}),
          check::random_tensor("k_shared", {d.tokens, d.rope_dim})};
}

std::vector<Tensor> definition(const Dims& d, const std::vector<int64_t>& offsets, const std::vector<Tensor>& in) {
  const double scale = d.scale != 0 ? d.scale : 1 / std::sqrt(double(d.nope_dim + d.rope_dim));
  const reference::Problem p{d.tokens, d.heads, d.nope_dim, d.rope_dim, d.value_dim, scale, offsets};
  auto result = reference::forward(p, in[0].values, in[1].values, in[2].values,
                                   std::vector<double>(size_t(d.heads), kMaxLogitBefore));
  return {{"o", {d.tokens, d.heads, d.value_dim}, std::move(result.o)},
          {"max_logit", {d.heads}, std::move(result.max_logit), GradientRule::none}};
}

check::Case make_case(HeadShape s, const std::vector<int64_t>& lengths, double q_scale = 1.0, double scale = 0) {
  const std::vector<int64_t> offsets = offsets_of(lengths);
  Dims d = dims_of(s, offsets);
  d.scale = scale;
  return {.name = fmt::format("documents {} H {} {}/{}/{} q x{} scale {}", fmt::join(lengths, "+"), d.heads, d.nope_dim,
                              d.rope_dim, d.value_dim, q_scale, scale),
          .inputs = [=] { return inputs(d, q_scale); },
          .reference = [=](const std::vector<Tensor>& in) { return definition(d, offsets, in); },
          .run = [=](const check::Run& r) { run(d, place_documents(r.context, offsets), r); }};
}

check::SpeedCase make_speed(HeadShape s, int64_t documents, int64_t length) {
  const std::vector<int64_t> offsets = offsets_of(std::vector<int64_t>(size_t(documents), length));
  const Dims d = dims_of(s, offsets);
  return {
      .name = fmt::format("T {} of {} H {} {}/{}/{}", d.tokens, length, d.heads, d.nope_dim, d.rope_dim, d.value_dim),
      .inputs = [=] { return inputs(d, 1.0); },
      .output_shapes = {{d.tokens, d.heads, d.value_dim}},
      .run = [=](const check::Run& r) { run(d, place_documents(r.context, offsets), r); }};
}

}  // namespace

const check::OpTable& table() {
  // Lengths around the register (16), diagonal (64), key (128) and query (256) blocks;
  // the last document of the last case lies in two groups of keys.
  static const check::OpTable t{
      .op = "mla",
      .cases = {make_case({2, 4, 2, 3}, {0}), make_case({2, 4, 2, 3}, {1}), make_case({1, 3, 1, 2}, {2}),
                make_case({2, 4, 2, 3}, {0, 1, 15, 0, 16, 17, 1}), make_case({3, 5, 3, 7}, {63, 1, 64, 65}),
                make_case({1, 8, 4, 8}, {127, 128, 129, 1}), make_case({2, 3, 1, 1}, {1, 1, 1, 1, 1}),
                make_case({1, 4, 2, 4}, {255, 0, 257}), make_case({1, 4, 0, 4}, {40}), make_case({1, 0, 4, 4}, {40}),
                make_case({2, 2, 2, 2}, {30}, 1.0, 0.7), make_case({2, 8, 4, 4}, {70}, 10.0),
                make_case({1, 2, 1, 2}, {3, 640, 500})},
      .speed = {make_speed({8, 128, 64, 128}, 1, 2048), make_speed({4, 32, 16, 32}, 8, 1024)},
      .more = more_checks};
  return t;
}

}  // namespace tessera::ops::mla
