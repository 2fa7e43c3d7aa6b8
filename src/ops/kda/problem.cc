#include "ops/kda/problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::ops::kda {

using check::GradientRule;
using check::Tensor;
using reference::Values;

std::vector<int64_t> Problem::offsets() const {
  std::vector<int64_t> out{0};
  for (int64_t length : lengths) out.push_back(out.back() + length);
  return out;
}

std::string Problem::name() const {
  std::string text = fmt::format("T {}", dims.tokens);
  if (lengths.size() != 1) text += fmt::format(" in {} documents", lengths.size());
  text += fmt::format(" H {}", dims.heads);
  if (dims.value_heads != dims.heads) text += fmt::format(" HV {}", dims.value_heads);
  text += fmt::format(" K {} V {} C {} {}", dims.key_dim, dims.value_dim, dims.chunk,
                      dims.gate == Gate::bounded ? "bounded" : "unbounded");
  if (dims.lower_bound != -5) text += fmt::format(" by {}", dims.lower_bound);
  if (!has_a_log) text += " no A_log";
  if (!initial_state) text += " from zero";
  if (dims.negative_eigenvalues) text += " beta to 2";
  if (z_shift != 0 || z_scale != 1) text += fmt::format(" z {} x {}", z_shift, z_scale);
  if (a_log != 0) text += fmt::format(" A_log {}", a_log);
  if (beta_shift != 0) text += fmt::format(" beta logit {}", beta_shift);
  return text;
}

std::vector<Tensor> Problem::tensors() const {
  const Dims& d = dims;
  const auto random = [&](std::string name, std::vector<int64_t> shape, double scale = 1.0) {
    if (distinct_rows == 0) return check::random_tensor(std::move(name), std::move(shape), scale);
    const int64_t period = distinct_rows * (shape.size() == 3 ? shape.back() : 1);
    return check::periodic_tensor(std::move(name), std::move(shape), period, scale);
  };
  const auto normalised = [&](std::string name) {
    Tensor t = random(std::move(name), {d.tokens, d.heads, d.key_dim});
    for (size_t r = 0; r < t.values.size(); r += size_t(d.key_dim)) {
      double square = 0;
      for (size_t c = 0; c < size_t(d.key_dim); ++c) square += t.values[r + c] * t.values[r + c];
      for (size_t c = 0; c < size_t(d.key_dim); ++c) t.values[r + c] /= std::sqrt(square);
    }
    return t;
  };
  const auto shifted = [](Tensor t, double shift) {
    for (double& x : t.values) x += shift;
    return t;
  };
  const auto exact = [](Tensor t) {
    t.exact = true;
    return t;
  };
  // On a GPU these two are sums of terms that cancel, taken from operands of 8 and 10 bits: attention.md 12.
  const auto loose = [](Tensor t) {
    t.bf16_limit = 1e-2;
    return t;
  };
  std::vector<Tensor> all{normalised("q"),
                          normalised("k"),
                          random("v", {d.tokens, d.value_heads, d.value_dim}),
                          loose(shifted(random("z", {d.tokens, d.value_heads, d.key_dim}, z_scale), z_shift)),
                          loose(shifted(random("beta_logit", {d.tokens, d.value_heads}), beta_shift)),
                          exact(check::random_tensor("dt_bias", {d.value_heads, d.key_dim}, 0.5, GradientRule::add))};
  if (has_a_log) {
    Tensor t = exact(shifted(check::random_tensor("a_log", {d.value_heads}, 0.3, GradientRule::add), a_log));
    if (d.value_heads < 16) t.bf16_limit = 0.1;  // a sum a head, of all its gates: those of a few may all lie near 0
    all.push_back(t);
  }
  if (initial_state) {
    all.push_back(
        exact(check::random_tensor("initial_state", {documents(), d.value_heads, d.value_dim, d.key_dim}, 0.5)));
  }
  return all;
}

reference::Inputs Problem::values(const std::vector<Tensor>& t) const {
  const size_t state_at = has_a_log ? 7 : 6;
  return {t[0].values, t[1].values,
          t[2].values, t[3].values,
          t[4].values, has_a_log ? t[6].values : Values{},
          t[5].values, initial_state ? t[state_at].values : Values{},
          offsets()};
}

std::vector<Tensor> Problem::outputs(const reference::Outputs& out) const {
  std::vector<Tensor> all{
      {"o", {dims.tokens, dims.value_heads, dims.value_dim}, out.o},
      {"final_state", {documents(), dims.value_heads, dims.value_dim, dims.key_dim}, out.final_state}};
  all[1].exact = true;
  return all;
}

Problem make_problem(std::vector<int64_t> lengths, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t chunk,
                     Gate gate) {
  Problem p;
  p.dims = {.tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0}),
            .heads = heads,
            .value_heads = heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .chunk = chunk,
            .gate = gate};
  p.lengths = std::move(lengths);
  return p;
}

namespace {

// Inputs or their gradients.
template <class To>
void bind(const Problem& p, std::span<const View> v, To& to) {
  to.q = v[0];
  to.k = v[1];
  to.v = v[2];
  to.z = v[3];
  to.beta_logit = v[4];
  to.dt_bias = v[5];
  if (p.has_a_log) to.a_log = v[6];
  if (p.initial_state) to.initial_state = v[p.has_a_log ? 7 : 6];
}

}  // namespace

Inputs bind_inputs(const Problem& p, std::span<const View> views) {
  Inputs in;
  bind(p, views, in);
  return in;
}

void run_views(const Problem& p, const check::Run& r) {
  const std::vector<int64_t> offsets = p.offsets();
  Inputs in = bind_inputs(p, r.inputs);
  in.documents = place_documents(r.context, offsets);
  if (r.d_outputs.empty()) return forward(r.context, p.dims, in, {r.outputs[0], r.outputs[1]}, nullptr);
  Saved saved = allocate_saved(r.context, p.dims, in.documents, in.q.dtype());
  forward(r.context, p.dims, in, {r.outputs[0], r.outputs[1]}, &saved);
  Grads grads;
  bind(p, r.d_inputs, grads);
  backward(r.context, p.dims, in, saved, {r.d_outputs[0], r.d_outputs[1]}, grads);
}

check::Case make_case(const Problem& p) {
  return {
      .name = p.name(),
      .inputs = [=] { return p.tensors(); },
      .reference = [=](const std::vector<Tensor>& in) { return p.outputs(reference::forward(p.dims, p.values(in))); },
      .run = [=](const check::Run& r) { run_views(p, r); }};
}

namespace {

View write(Arena& arena, DType dtype, const Values& values, Shape shape) {
  const View view = arena.allocate(dtype, shape);
  dispatch_real(dtype, [&](auto real) {
    using Real = decltype(real);
    for (size_t i = 0; i < values.size(); ++i) view.as<Real>()[i] = static_cast<Real>(values[i]);
  });
  return view;
}

Values read(const View& view) {
  Values values(static_cast<size_t>(view.elements()));
  if (!view.present()) return values;
  dispatch_real(view.dtype(), [&](auto real) {
    using Real = decltype(real);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(view.as<Real>()[i]);
  });
  return values;
}

}  // namespace

Result run_values(const Problem& p, const reference::Inputs& in, DType dtype, const Values& d_o,
                  const Values& d_final) {
  const Dims& d = p.dims;
  Arena arena(int64_t{8} << 30);  // address space only
  arena.set_poison(true);
  Context ctx{Device::cpu, arena};
  const Shape qk{d.tokens, d.heads, d.key_dim}, value{d.tokens, d.value_heads, d.value_dim};
  const Shape channel{d.tokens, d.value_heads, d.key_dim}, scalar{d.tokens, d.value_heads};
  const Shape state{p.documents(), d.value_heads, d.value_dim, d.key_dim};
  const auto put = [&](const Values& values, Shape shape) { return write(arena, dtype, values, shape); };
  Inputs inputs{put(in.q, qk),
                put(in.k, qk),
                put(in.v, value),
                put(in.z, channel),
                put(in.beta_logit, scalar),
                in.a_log.empty() ? View() : put(in.a_log, {d.value_heads}),
                put(in.dt_bias, {d.value_heads, d.key_dim}),
                in.initial_state.empty() ? View() : put(in.initial_state, state),
                {in.offsets}};
  const Outputs out{arena.allocate(dtype, value), arena.allocate(dtype, state)};
  Saved saved = allocate_saved(ctx, d, inputs.documents, dtype);
  forward(ctx, d, inputs, out, &saved);
  const OutputGrads dout{put(d_o, value), d_final.empty() ? View() : put(d_final, state)};
  const Grads grads{arena.allocate(dtype, qk),
                    arena.allocate(dtype, qk),
                    arena.allocate(dtype, value),
                    arena.allocate(dtype, channel),
                    arena.allocate(dtype, scalar),
                    in.a_log.empty() ? View() : arena.allocate_zeroed(dtype, {d.value_heads}),
                    arena.allocate_zeroed(dtype, {d.value_heads, d.key_dim}),
                    arena.allocate(dtype, state)};
  backward(ctx, d, inputs, saved, dout, grads);
  return {{read(out.o), read(out.final_state)},
          {read(grads.q), read(grads.k), read(grads.v), read(grads.z), read(grads.beta_logit), read(grads.a_log),
           read(grads.dt_bias), read(grads.initial_state)}};
}

reference::Outputs run_steps(const Problem& p, const reference::Inputs& in, DType dtype) {
  Dims d = p.dims;
  const int64_t sequences = p.documents(), length = p.lengths[0];
  d.tokens = sequences;
  Arena arena(int64_t{1} << 30);  // address space only
  arena.set_poison(true);
  Context ctx{Device::cpu, arena};
  const View state = write(arena, dtype, in.initial_state, {sequences, d.value_heads, d.value_dim, d.key_dim});
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= sequences; ++n) offsets.push_back(n);
  reference::Outputs out{Values(in.v.size()), {}};
  for (int64_t t = 0; t < length; ++t) {
    Arena::Scope scope(arena);
    const auto tokens = [&](const Values& values, int64_t heads, int64_t width) {  // token t of every document
      Values rows;
      for (int64_t n = 0; n < sequences; ++n) {
        const Values row = token_rows(p, values, n * length + t, n * length + t + 1);
        rows.insert(rows.end(), row.begin(), row.end());
      }
      return write(arena, dtype, rows, width == 0 ? Shape{sequences, heads} : Shape{sequences, heads, width});
    };
    const Inputs inputs{tokens(in.q, d.heads, d.key_dim),
                        tokens(in.k, d.heads, d.key_dim),
                        tokens(in.v, d.value_heads, d.value_dim),
                        tokens(in.z, d.value_heads, d.key_dim),
                        tokens(in.beta_logit, d.value_heads, 0),
                        in.a_log.empty() ? View() : write(arena, dtype, in.a_log, {d.value_heads}),
                        write(arena, dtype, in.dt_bias, {d.value_heads, d.key_dim}),
                        View(),
                        {offsets}};
    const View o = arena.allocate(dtype, {sequences, d.value_heads, d.value_dim});
    step(ctx, d, inputs, state, o);
    const Values rows = read(o);
    const int64_t width = d.value_heads * d.value_dim;
    for (int64_t n = 0; n < sequences; ++n) {
      std::copy_n(rows.begin() + n * width, width, out.o.begin() + (n * length + t) * width);
    }
  }
  out.final_state = read(state);
  return out;
}

Values output_gradient(const Problem& p) {
  return check::random_tensor("do", {p.dims.tokens, p.dims.value_heads, p.dims.value_dim}).values;
}

Values state_gradient(const Problem& p) {
  return check::random_tensor("dfinal", {p.documents(), p.dims.value_heads, p.dims.value_dim, p.dims.key_dim}).values;
}

Result run_reference(const Problem& p, const reference::Inputs& in, const Values& d_o, const Values& d_final) {
  return {reference::forward(p.dims, in), reference::backward(p.dims, in, d_o, d_final)};
}

Values token_rows(const Problem& p, const Values& values, int64_t begin, int64_t end) {
  const int64_t width = int64_t(values.size()) / std::max<int64_t>(p.dims.tokens, 1);
  return {values.begin() + begin * width, values.begin() + end * width};
}

Values document_row(const Problem& p, const Values& values, int64_t document) {
  const int64_t width = int64_t(values.size()) / p.documents();
  return {values.begin() + document * width, values.begin() + (document + 1) * width};
}

Problem one_document(const Problem& p, int64_t document) {
  Problem one = p;
  one.lengths = {p.lengths[size_t(document)]};
  one.dims.tokens = one.lengths[0];
  return one;
}

reference::Inputs one_document(const Problem& p, const reference::Inputs& in, int64_t document) {
  const int64_t begin = in.offsets[size_t(document)], end = in.offsets[size_t(document) + 1];
  const auto rows = [&](const Values& values) { return token_rows(p, values, begin, end); };
  return {rows(in.q),          rows(in.k), rows(in.v), rows(in.z),
          rows(in.beta_logit), in.a_log,   in.dt_bias, document_row(p, in.initial_state, document),
          {0, end - begin}};
}

Result one_document(const Problem& p, const Result& r, int64_t document) {
  const int64_t begin = p.offsets()[size_t(document)], end = begin + p.lengths[size_t(document)];
  const auto rows = [&](const Values& values) { return token_rows(p, values, begin, end); };
  return {{rows(r.out.o), document_row(p, r.out.final_state, document)},
          {rows(r.grads.q),
           rows(r.grads.k),
           rows(r.grads.v),
           rows(r.grads.z),
           rows(r.grads.beta_logit),
           {},
           {},
           document_row(p, r.grads.initial_state, document)}};
}

namespace {

template <class F>
void for_each_pair(const Result& a, const Result& b, F&& f) {
  f(a.out.o, b.out.o);
  f(a.out.final_state, b.out.final_state);
  f(a.grads.q, b.grads.q);
  f(a.grads.k, b.grads.k);
  f(a.grads.v, b.grads.v);
  f(a.grads.z, b.grads.z);
  f(a.grads.beta_logit, b.grads.beta_logit);
  f(a.grads.a_log, b.grads.a_log);
  f(a.grads.dt_bias, b.grads.dt_bias);
  f(a.grads.initial_state, b.grads.initial_state);
}

}  // namespace

double difference(const Result& got, const Result& want) {
  double worst = 0;
  for_each_pair(got, want, [&](const Values& a, const Values& b) {
    TESSERA_CHECK(a.size() == b.size(), "{} values compared with {}", a.size(), b.size());
    const double error = check::relative_error(a, b);
    if (!(error <= worst)) worst = error;  // a NaN stays
  });
  return worst;
}

double unequal(const Result& a, const Result& b) {
  double count = 0;
  for_each_pair(a, b, [&](const Values& x, const Values& y) {
    TESSERA_CHECK(x.size() == y.size(), "{} values compared with {}", x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i) count += x[i] == y[i] ? 0 : 1;  // a NaN counts
  });
  return count;
}

}  // namespace tessera::ops::kda
