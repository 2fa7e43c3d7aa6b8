#include "ops/kda/map_cases.h"

#include <fmt/format.h>

namespace tessera::ops::kda {
namespace {

using check::GradientRule;
using check::Tensor;
using reference::Values;

Tensor given(Tensor t) {
  t.gradient = GradientRule::none;
  return t;
}
Tensor exact(std::string name, std::vector<int64_t> shape, Values values) {
  Tensor t{std::move(name), std::move(shape), std::move(values), GradientRule::none};
  t.exact = true;
  return t;
}

// By definition, of one document: X from no state, dX from no gradient of the final state, and T from the state I and
// no values, whose heads are as wide as keys.
std::vector<Tensor> definition(const Problem& p, const std::vector<Tensor>& in, int64_t document) {
  const Problem one = one_document(p, document);
  Dims d = one.dims;
  const Values d_o = token_rows(p, in.back().values, p.offsets()[size_t(document)], p.offsets()[size_t(document) + 1]);
  reference::Inputs values = p.values(in);
  if (values.initial_state.empty()) values.initial_state = Values(state_gradient(p).size());
  values = one_document(p, values, document);
  values.initial_state.clear();
  const Values offset = reference::forward(d, values).final_state;
  const Values d_offset = reference::backward(d, values, d_o, {}).initial_state;
  d.value_dim = d.key_dim;
  values.v = Values(size_t(d.tokens * d.value_heads * d.key_dim));
  values.initial_state = Values(size_t(d.value_heads * d.key_dim * d.key_dim));
  for (int64_t i = 0; i < d.value_heads * d.key_dim; ++i) {
    values.initial_state[size_t(i * d.key_dim + i % d.key_dim)] = 1;
  }
  const Values transition = reference::forward(d, values).final_state;
  const std::vector<int64_t> state{d.value_heads, p.dims.value_dim, d.key_dim};
  return {exact("transition", {d.value_heads, d.key_dim, d.key_dim}, transition), exact("offset", state, offset),
          exact("d offset", state, d_offset)};
}

check::Case map_case(const Problem& p, int64_t document) {
  check::Case c;
  c.limit_bf16 = 4e-3;  // that of gradients: dX is one
  c.name = fmt::format("map of document {}: {}", document, p.name());
  c.inputs = [=] {
    std::vector<Tensor> in = p.tensors();
    in.push_back(check::random_tensor("do", {p.dims.tokens, p.dims.value_heads, p.dims.value_dim}));
    for (Tensor& t : in) t = given(t);
    return in;
  };
  c.reference = [=](const std::vector<Tensor>& in) {
    std::vector<Tensor> out = definition(p, in, document);
    Tensor o = p.outputs(reference::forward(p.dims, p.values(in)))[0];
    out.push_back(given(o));
    return out;
  };
  c.run = [=](const check::Run& r) {
    const std::vector<int64_t> offsets = p.offsets();
    Inputs in = bind_inputs(p, r.inputs);
    in.documents = place_documents(r.context, offsets);
    Saved saved = allocate_saved(r.context, p.dims, in.documents, in.q.dtype());
    state_map(r.context, p.dims, in, document, {r.outputs[0], r.outputs[1]});
    forward(r.context, p.dims, in, {r.outputs[3], View()}, &saved);
    state_gradient_map(r.context, p.dims, in, saved, r.inputs.back(), document, r.outputs[2]);
  };
  return c;
}

// S T + X and S T^T + X.
std::vector<Tensor> folded(int64_t heads, int64_t width, const std::vector<Tensor>& in) {
  const std::vector<int64_t> shape{heads, width, width};
  Values forward = in[2].values, backward = in[2].values;
  for (int64_t row = 0; row < heads * width; ++row) {
    const int64_t of_head = row / width * width;
    for (int64_t a = 0; a < width; ++a) {
      for (int64_t b = 0; b < width; ++b) {
        const double t = in[1].values[size_t((of_head + a) * width + b)];
        forward[size_t(row * width + b)] += in[0].values[size_t(row * width + a)] * t;
        backward[size_t(row * width + a)] += in[0].values[size_t(row * width + b)] * t;
      }
    }
  }
  return {exact("S T + X", shape, forward), exact("S T^T + X", shape, backward)};
}

}  // namespace

std::vector<check::Case> map_cases(const std::vector<Problem>& problems) {
  std::vector<check::Case> cases;
  for (const Problem& p : problems) {
    for (int64_t n = 0; n < p.documents(); n += std::max<int64_t>(1, p.documents() / 2))
      cases.push_back(map_case(p, n));
  }
  return cases;
}

check::Case fold_case(int64_t heads, int64_t width) {
  check::Case c;
  c.name = fmt::format("fold H {} K {}", heads, width);
  c.inputs = [=] {
    std::vector<Tensor> in;
    for (const char* name : {"S", "T", "X"}) {
      in.push_back(exact(name, {heads, width, width}, check::random_tensor(name, {heads, width, width}).values));
    }
    return in;
  };
  c.reference = [=](const std::vector<Tensor>& in) { return folded(heads, width, in); };
  c.run = [=](const check::Run& r) {
    const StateMap map{r.inputs[1], r.inputs[2]};
    for (const View& out : r.outputs) copy(r.inputs[0], out);
    fold(r.context, map, r.outputs[0]);
    fold_gradient(r.context, map, r.outputs[1]);
  };
  return c;
}

}  // namespace tessera::ops::kda
