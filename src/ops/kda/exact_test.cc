// What must hold bit for bit: runs, thread counts, packs, prefixes.
#include <gtest/gtest.h>

#include <limits>

#include "core/parallel.h"
#include "ops/kda/problem.h"

namespace tessera::ops::kda {
namespace {

using reference::Values;

Result run_f32(const Problem& p, const reference::Inputs& in) {
  return run_values(p, in, DType::f32, output_gradient(p), state_gradient(p));
}

TEST(KdaExact, RunsAndThreadCounts) {
  const Problem p = make_problem({1100, 0, 40, 1, 1, 900, 30}, 3, 32, 16, 64);
  const reference::Inputs in = p.values();
  const int threads = thread_count();
  const Result first = run_f32(p, in);
  EXPECT_EQ(unequal(run_f32(p, in), first), 0);
  for (const int count : {1, 2, 5}) {
    set_thread_count(count);
    EXPECT_EQ(unequal(run_f32(p, in), first), 0) << count << " threads";
  }
  set_thread_count(threads);
}

// The documents of `p` in the order `order`; -1 stands for an empty document that was not there.
struct Pack {
  Problem p;
  reference::Inputs in;
  Values d_o, d_final;
};
Pack arrange(const Problem& p, const reference::Inputs& in, const std::vector<int64_t>& order) {
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  Pack out{p, {}, {}, {}};
  out.p.lengths.clear();
  out.in.a_log = in.a_log;
  out.in.dt_bias = in.dt_bias;
  const auto append = [](Values& to, const Values& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (const int64_t n : order) {
    const int64_t source = std::max<int64_t>(n, 0);
    const reference::Inputs one = one_document(p, in, source);
    append(out.in.initial_state, one.initial_state);
    append(out.d_final, document_row(p, d_final, source));
    out.p.lengths.push_back(n < 0 ? 0 : p.lengths[size_t(n)]);
    if (n < 0) continue;
    append(out.in.q, one.q);
    append(out.in.k, one.k);
    append(out.in.v, one.v);
    append(out.in.z, one.z);
    append(out.in.beta_logit, one.beta_logit);
    append(out.d_o, token_rows(p, d_o, in.offsets[size_t(n)], in.offsets[size_t(n) + 1]));
  }
  out.in.offsets = out.p.offsets();
  return out;
}

TEST(KdaExact, InsertedEmptyDocumentAndPermutedDocuments) {
  const Problem p = make_problem({17, 64, 1, 130, 33}, 2, 16, 16, 64);
  const reference::Inputs in = p.values();
  const Result base = run_f32(p, in);
  for (const std::vector<int64_t>& order :
       {std::vector<int64_t>{-1, 0, 1, -1, 2, 3, 4, -1}, std::vector<int64_t>{3, 2, 4, 0, 1}}) {
    const Pack pack = arrange(p, in, order);
    const Result got = run_values(pack.p, pack.in, DType::f32, pack.d_o, pack.d_final);
    for (size_t i = 0; i < order.size(); ++i) {
      if (order[i] >= 0) {
        EXPECT_EQ(unequal(one_document(pack.p, got, int64_t(i)), one_document(p, base, order[i])), 0);
      } else {  // the state and its gradient pass through
        const Result empty = one_document(pack.p, got, int64_t(i));
        const Values state = document_row(pack.p, pack.in.initial_state, int64_t(i));
        const Values d_state = document_row(pack.p, pack.d_final, int64_t(i));
        for (size_t e = 0; e < state.size(); ++e) {
          EXPECT_EQ(empty.out.final_state[e], double(float(state[e])));
          EXPECT_EQ(empty.grads.initial_state[e], double(float(d_state[e])));
        }
      }
    }
    if (order.front() < 0) {
      EXPECT_EQ(got.grads.a_log, base.grads.a_log);
      EXPECT_EQ(got.grads.dt_bias, base.grads.dt_bias);
    }
  }
}

TEST(KdaExact, NeighboursFullOfNanChangeNothing) {
  const Problem p = make_problem({20, 50, 70}, 2, 16, 16, 32);
  reference::Inputs in = p.values();
  const Result clean = one_document(p, run_f32(p, in), 1);
  for (Values* values : {&in.q, &in.k, &in.v, &in.z, &in.beta_logit}) {
    const size_t width = values->size() / size_t(p.dims.tokens);
    for (size_t i = 0; i < values->size(); ++i) {
      if (i / width < 20 || i / width >= 70) (*values)[i] = std::numeric_limits<double>::quiet_NaN();
    }
  }
  EXPECT_EQ(unequal(one_document(p, run_f32(p, in), 1), clean), 0);
}

// Rows [0, prefix) of everything that is per token, and the parameter gradients.
Result prefix_of(const Problem& p, Result r, int64_t prefix) {
  for (Values* values : {&r.out.o, &r.grads.q, &r.grads.k, &r.grads.v, &r.grads.z, &r.grads.beta_logit}) {
    *values = token_rows(p, *values, 0, prefix);
  }
  r.out.final_state.clear();
  return r;
}

void expect_prefix_causal(int64_t tokens, int64_t prefix, int64_t chunk, Gate gate) {
  const Problem p = make_problem({tokens}, 2, 32, 16, chunk, gate);
  const reference::Inputs in = p.values();
  Values d_o = output_gradient(p);  // a loss on the prefix
  std::fill(d_o.begin() + prefix * p.dims.value_heads * p.dims.value_dim, d_o.end(), 0.0);
  const Result base = prefix_of(p, run_values(p, in, DType::f32, d_o, {}), prefix);

  reference::Inputs other = in;  // later tokens changed, gates to their ends
  for (Values* values : {&other.q, &other.k, &other.v, &other.z, &other.beta_logit}) {
    const size_t width = values->size() / size_t(tokens);
    for (size_t i = size_t(prefix) * width; i < values->size(); ++i) (*values)[i] = i % 3 == 0 ? 9.0 : -(*values)[i];
  }
  EXPECT_EQ(unequal(prefix_of(p, run_values(p, other, DType::f32, d_o, {}), prefix), base), 0)
      << "changed after " << prefix << " of " << tokens << " C " << chunk;

  const Problem cut = make_problem({prefix}, 2, 32, 16, chunk, gate);  // later tokens removed
  reference::Inputs shorter = in;
  for (Values* values : {&shorter.q, &shorter.k, &shorter.v, &shorter.z, &shorter.beta_logit, &d_o}) {
    *values = token_rows(p, *values, 0, prefix);
  }
  shorter.offsets = {0, prefix};
  EXPECT_EQ(unequal(prefix_of(cut, run_values(cut, shorter, DType::f32, d_o, {}), prefix), base), 0)
      << "cut after " << prefix << " of " << tokens << " C " << chunk;
}

TEST(KdaExact, PrefixDoesNotDependOnWhatFollows) {
  for (const int64_t prefix : {1, 2, 15, 16, 17, 20, 40, 48, 63, 64, 65, 80, 100}) {
    for (const int64_t chunk : {16, 32, 64}) {
      expect_prefix_causal(130, prefix, chunk, prefix % 2 == 0 ? Gate::bounded : Gate::unbounded);
    }
  }
}

TEST(KdaExact, AppendedDocumentsChangeNoSum) {
  const std::vector<int64_t> lengths{700, 30, 600};
  const Problem p = make_problem(lengths, 2, 16, 16, 64), longer = make_problem({700, 30, 600, 900, 5}, 2, 16, 16, 64);
  const reference::Inputs all = longer.values();
  reference::Inputs in = all;
  for (Values* values : {&in.q, &in.k, &in.v, &in.z, &in.beta_logit}) {
    *values = token_rows(longer, *values, 0, p.dims.tokens);
  }
  in.offsets = p.offsets();
  in.initial_state.resize(in.initial_state.size() / 5 * 3);
  Values d_o = output_gradient(longer);
  std::fill(d_o.begin() + p.dims.tokens * 2 * 16, d_o.end(), 0.0);
  const Result part = run_values(p, in, DType::f32, token_rows(longer, d_o, 0, p.dims.tokens), {});
  const Result whole = run_values(longer, all, DType::f32, d_o, {});
  EXPECT_EQ(part.grads.a_log, whole.grads.a_log);
  EXPECT_EQ(part.grads.dt_bias, whole.grads.dt_bias);
}

}  // namespace
}  // namespace tessera::ops::kda
