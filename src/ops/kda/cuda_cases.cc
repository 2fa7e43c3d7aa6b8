#include "ops/kda/cuda_cases.h"

#include <functional>

#include "ops/kda/cuda.h"
#include "ops/kda/map_cases.h"
#include "ops/kda/problem.h"
#include "ops/kda/shards.h"

namespace tessera::ops::kda {
namespace {

using check::GradientRule;
using check::Tensor;

std::vector<Tensor> without_gradients(std::vector<Tensor> tensors) {
  for (Tensor& t : tensors) t.gradient = GradientRule::none;
  return tensors;
}

// ---- decode ----

// Token by token: one document, or documents of one token.
void decode(const Problem& p, const check::Run& r) {
  const int64_t sequences = p.documents();
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= sequences; ++n) offsets.push_back(n);
  const Documents documents = place_documents(r.context, offsets);
  const Inputs all = bind_inputs(p, r.inputs);
  copy(all.initial_state, r.outputs[1]);
  Dims d = p.dims;
  d.tokens = sequences;
  for (int64_t t = 0; t < p.lengths[0]; ++t) {
    const auto now = [&](const View& view) { return view.row_range(t, sequences); };
    const Inputs in{now(all.q), now(all.k),  now(all.v), now(all.z), now(all.beta_logit),
                    all.a_log,  all.dt_bias, View(),     documents};
    step(r.context, d, in, r.outputs[1], now(r.outputs[0]));
  }
}

check::Case decode_case(const Problem& p) {
  check::Case c = make_case(p);
  c.name = "decode, " + c.name;
  c.inputs = [=] { return without_gradients(p.tensors()); };
  c.run = [=](const check::Run& r) { decode(p, r); };
  return c;
}

// ---- equality of bits ----

int64_t unequal_bytes(const View& a, const View& b) {
  if (a.data() == nullptr) return 0;  // dry
  std::vector<std::byte> x(static_cast<size_t>(a.bytes())), y(x.size());
  copy(a, View(x.data(), a.dtype(), a.shape()));
  copy(b, View(y.data(), b.dtype(), b.shape()));
  int64_t count = 0;
  for (size_t i = 0; i < x.size(); ++i) count += x[i] != y[i];
  return count;
}

struct Results {
  Outputs out;
  Grads grads;
};
Results run(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& d_out) {
  const auto like = [&](const View& view) {
    return view.present() ? ctx.arena.allocate_zeroed(view.dtype(), view.shape()) : View();
  };
  const Results r{{like(in.v), like(in.initial_state)},
                  {like(in.q), like(in.k), like(in.v), like(in.z), like(in.beta_logit), like(in.a_log),
                   like(in.dt_bias), like(in.initial_state)}};
  Saved saved = allocate_saved(ctx, d, in.documents, in.q.dtype());
  forward(ctx, d, in, r.out, &saved);
  backward(ctx, d, in, saved, d_out, r.grads);
  return r;
}

// The tokens [begin, end) as one document, from the state of document n.
Results run_alone(const Problem& p, Context& ctx, const Inputs& all, const OutputGrads& d_out, int64_t n, int64_t begin,
                  int64_t end) {
  const auto part = [&](const View& view) { return view.row_range(begin, end - begin); };
  const auto of_document = [&](const View& view) { return view.present() ? view.row_range(n, 1) : View(); };
  const std::vector<int64_t> offsets{0, end - begin};
  Dims d = p.dims;
  d.tokens = end - begin;
  const Inputs in{part(all.q),
                  part(all.k),
                  part(all.v),
                  part(all.z),
                  part(all.beta_logit),
                  all.a_log,
                  all.dt_bias,
                  of_document(all.initial_state),
                  place_documents(ctx, offsets)};
  return run(ctx, d, in, {part(d_out.o), of_document(d_out.final_state)});
}

// Bytes of the tokens' results in `whole`, from `begin` on, that are not those in `part`.
int64_t unequal_tokens(const Results& whole, int64_t begin, const Results& part) {
  int64_t count = 0;
  const auto compare = [&](const View& a, const View& b) { count += unequal_bytes(a.row_range(begin, b.dim(0)), b); };
  compare(whole.out.o, part.out.o);
  compare(whole.grads.q, part.grads.q);
  compare(whole.grads.k, part.grads.k);
  compare(whole.grads.v, part.grads.v);
  compare(whole.grads.z, part.grads.z);
  compare(whole.grads.beta_logit, part.grads.beta_logit);
  return count;
}

// The number of bytes in which `compare` finds results to differ: an output of one value. The gradients given are
// values of the right shapes that are at hand: v and the initial states.
using Compare = std::function<int64_t(const Problem&, Context&, const Inputs&)>;
check::Case bits_case(const Problem& p, const std::string& what, const Compare& compare) {
  const auto run_compare = [=](const check::Run& r) {
    const std::vector<int64_t> offsets = p.offsets();
    Inputs in = bind_inputs(p, r.inputs);
    in.documents = place_documents(r.context, offsets);
    float count = static_cast<float>(compare(p, r.context, in));
    copy(View(&count, DType::f32, {1}), r.outputs[0]);
  };
  const auto reference = [](const std::vector<Tensor>&) {
    Tensor count{"unequal bytes", {1}, {0.0}};
    count.dtype = DType::f32;
    return std::vector<Tensor>{count};
  };
  return {.name = what + ": " + p.name(),
          .inputs = [=] { return without_gradients(p.tensors()); },
          .reference = reference,
          .run = run_compare};
}

check::Case packed_case(const Problem& p) {
  return bits_case(p, "packed = separate", [](const Problem& q, Context& ctx, const Inputs& in) {
    const OutputGrads d_out{in.v, in.initial_state};
    const Results whole = run(ctx, q.dims, in, d_out);
    int64_t count = 0;
    for (int64_t n = 0; n < q.documents(); ++n) {
      Arena::Scope scope(ctx.arena);
      const int64_t begin = in.documents.begin(n);
      const Results alone = run_alone(q, ctx, in, d_out, n, begin, in.documents.end(n));
      count += unequal_tokens(whole, begin, alone);
      count += unequal_bytes(whole.out.final_state.row_range(n, 1), alone.out.final_state);
      count += unequal_bytes(whole.grads.initial_state.row_range(n, 1), alone.grads.initial_state);
    }
    return count;
  });
}

// The first document cut short: what follows a token must not reach its bits, nor the gradients of what precedes it.
check::Case prefix_case(const Problem& p, const std::vector<int64_t>& ends) {
  return bits_case(p, "a prefix keeps its bits", [=](const Problem& q, Context& ctx, const Inputs& in) {
    int64_t count = 0;
    for (const int64_t end : ends) {
      Arena::Scope scope(ctx.arena);
      const OutputGrads d_out{ctx.arena.allocate_zeroed(in.v.dtype(), in.v.shape()), View()};
      copy(in.v.row_range(0, end), d_out.o.row_range(0, end));
      const Results whole = run(ctx, q.dims, in, d_out), alone = run_alone(q, ctx, in, d_out, 0, 0, end);
      count += unequal_tokens(whole, 0, alone);
      count += unequal_bytes(whole.grads.initial_state.row_range(0, 1), alone.grads.initial_state);
      count += unequal_bytes(whole.grads.dt_bias, alone.grads.dt_bias);
      count += unequal_bytes(whole.grads.a_log, alone.grads.a_log);
    }
    return count;
  });
}

// A document of several pieces in which the first state is still felt at the end: gates and betas near 0.
Problem long_memory(int64_t tokens, int64_t heads, int64_t dim, Gate gate) {
  return changed(make_problem({tokens, 70}, heads, dim, dim, 64, gate), [](Problem& p) {
    p.z_shift = -11;
    p.beta_shift = -8;
  });
}

// Ranks on one GPU: documents over two and three of them, of one piece and of several; maps by themselves; folds.
std::vector<check::Case> cuda_shard_cases() {
  std::vector<Problem> maps;
  std::vector<check::Case> cases;
  for (const Gate gate : {Gate::bounded, Gate::unbounded}) {
    for (const int64_t dim : {32, 64, 128}) {
      maps.push_back(changed(make_problem({0, 5, 130, 1}, 2, dim, dim, 64, gate), [](Problem& q) { q.z_shift = -5; }));
      const Problem p = changed(make_problem({2, 90, 3, 0, 240, 60, 0, 1}, 2, dim, dim, 64, gate),
                                [](Problem& q) { q.z_shift = -5; });
      cases.push_back(make_sharded_case(p, {0, 94, 110, 300, p.dims.tokens}));
      cases.push_back(
          make_sharded_case(changed(p, [](Problem& q) { q.initial_state = false; }), {0, 128, 200, p.dims.tokens}));
    }
  }
  const int64_t piece = cuda::kSegment * cuda::kChunk;
  maps.push_back(long_memory(4 * piece + 200, 2, 32, Gate::bounded));
  maps.push_back(long_memory(2 * piece + 130, 1, 64, Gate::unbounded));
  const Problem p = long_memory(5 * piece + 300, 2, 64, Gate::bounded);
  cases.push_back(make_sharded_case(p, {0, 100, 3 * piece, p.dims.tokens}));
  for (const check::Case& c : map_cases(maps)) cases.push_back(c);
  for (const int64_t dim : {32, 64, 128}) cases.push_back(fold_case(3, dim));
  return cases;
}

}  // namespace

std::vector<check::Case> cuda_cases() {
  std::vector<check::Case> cases;
  const auto add = [&](const Problem& p) { cases.push_back(make_case(p)); };
  for (const Gate gate : {Gate::bounded, Gate::unbounded}) {
    for (const int64_t dim : {32, 64, 128}) {
      add(make_problem({1}, 1, dim, dim, 64, gate));
      add(make_problem({63, 64, 65}, 2, dim, dim, 64, gate));
      add(make_problem({0, 5, 1, 130, 0, 17, 1}, 3, dim, dim, 64, gate));
      add(make_problem({1000}, 2, dim, dim, 64, gate));
      cases.push_back(decode_case(make_problem({1, 1, 1, 1, 1}, 3, dim, dim, 64, gate)));
      cases.push_back(decode_case(make_problem({37}, 2, dim, dim, 64, gate)));
    }
    add(changed(make_problem({200}, 2, 64, 64, 64, gate), [](Problem& p) {
      p.dims.negative_eigenvalues = true;
      p.beta_shift = 3;
      p.z_shift = -3;
    }));
    add(changed(make_problem({200, 3}, 2, 128, 128, 64, gate), [](Problem& p) { p.z_shift = -8; }));  // nearly no decay
    add(changed(make_problem({200, 3}, 2, 64, 64, 64, gate), [](Problem& p) { p.z_scale = 8; }));  // both in one tile
    add(changed(make_problem({200}, 2, 32, 32, 64, gate), [](Problem& p) { p.dims.scale = 1; }));
    add(make_problem({150}, 16, 32, 32, 64, gate));    // dA_log to its own limit
    for (const double a_log : {-80.0, 80.0, 100.0}) {  // nothing is lost to 0 times infinity
      add(changed(make_problem({100}, 2, 64, 64, 64, gate), [&](Problem& p) { p.a_log = a_log; }));
    }
    cases.push_back(packed_case(make_problem({65, 0, 1, 150, 17, 64, 1}, 2, 64, 64, 64, gate)));
    cases.push_back(prefix_case(make_problem({300}, 2, 128, 128, 64, gate), {1, 7, 16, 64, 100, 128, 299}));
  }
  add(make_problem({0, 0}, 2, 64, 64, 64));
  add(changed(make_problem({150, 40}, 2, 128, 128, 64), [](Problem& p) { p.initial_state = p.has_a_log = false; }));
  add(changed(make_problem({150, 40}, 2, 32, 32, 64), [](Problem& p) { p.dims.lower_bound = -0.5; }));
  add(changed(make_problem({200}, 2, 128, 128, 64), [](Problem& p) { p.z_shift = 8; }));  // all gates at -5
  add(changed(make_problem({200}, 2, 128, 128, 64, Gate::unbounded), [](Problem& p) {  // every token resets the state
    p.z_shift = 6;
    p.a_log = 5;
  }));
  const int64_t piece = cuda::kSegment * cuda::kChunk;
  add(long_memory(4 * piece + 200, 2, 32, Gate::bounded));
  add(long_memory(2 * piece + 130, 1, 128, Gate::unbounded));
  cases.push_back(
      prefix_case(long_memory(4 * piece + 200, 2, 32, Gate::bounded), {piece + 3, 2 * piece, 3 * piece + 70}));
  for (const check::Case& c : cuda_shard_cases()) cases.push_back(c);
  return cases;
}

}  // namespace tessera::ops::kda
