#include "ops/kda/shards.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::ops::kda {
namespace {

using check::Tensor;

struct Rank {
  int64_t begin = 0, end = 0;                // tokens of the pack
  int64_t first = 0, last = -1;              // documents of the pack that have a part here
  bool from_left = false, to_right = false;  // the first began before, the last goes on behind
  std::vector<int64_t> offsets;              // of the parts
  Dims dims;
  Inputs in;
  Saved saved;
  StateMap of_first, of_last;  // forward maps: where the rank has one document, both are that one's
  View d_offset;               // dX of the first document

  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }
  bool whole() const { return count() == 1 && from_left && to_right; }
};

Rank make_rank(const Problem& p, int64_t begin, int64_t end) {
  const std::vector<int64_t> all = p.offsets();
  Rank r;
  r.begin = begin, r.end = end, r.first = p.documents();
  for (int64_t n = 0; n < p.documents(); ++n) {
    const int64_t from = all[size_t(n)], to = all[size_t(n) + 1];
    const bool empty_here = from == to && from >= begin && (from < end || (end == all.back() && from == end));
    if (!empty_here && (from >= end || to <= begin)) continue;
    r.first = std::min(r.first, n);
    r.last = n;
    if (r.offsets.empty()) r.offsets.push_back(0);
    r.offsets.push_back(std::min(to, end) - begin);
  }
  if (r.offsets.empty()) r.offsets.push_back(0);
  r.from_left = r.last >= 0 && all[size_t(r.first)] < begin;
  r.to_right = r.last >= 0 && all[size_t(r.last) + 1] > end;
  r.dims = p.dims;
  r.dims.tokens = end - begin;
  return r;
}

// The emulation: ranks in the order of the tokens, and what would be sent between them.
struct Ranks {
  const Problem& p;
  const check::Run& run;
  Context& ctx;
  Inputs all;
  std::vector<Rank> ranks;

  Ranks(const Problem& problem, const std::vector<int64_t>& cuts, const check::Run& r)
      : p(problem), run(r), ctx(r.context), all(bind_inputs(p, r.inputs)) {
    for (size_t i = 0; i + 1 < cuts.size(); ++i) ranks.push_back(make_rank(p, cuts[i], cuts[i + 1]));
    for (Rank& rank : ranks) {
      const auto part = [&](const View& v) { return v.row_range(rank.begin, rank.end - rank.begin); };
      rank.in = {part(all.q),
                 part(all.k),
                 part(all.v),
                 part(all.z),
                 part(all.beta_logit),
                 all.a_log,
                 all.dt_bias,
                 View(),
                 place_documents(ctx, rank.offsets)};
    }
  }

  View states(int64_t count) const {
    const Dims& d = p.dims;
    return ctx.arena.allocate_zeroed(exact_type(all.q.dtype()), {count, d.value_heads, d.value_dim, d.key_dim});
  }
  View offset() const { return states(1).at(0); }
  View transition() const {
    const Dims& d = p.dims;
    return ctx.arena.allocate(exact_type(all.q.dtype()), {d.value_heads, d.key_dim, d.key_dim});
  }

  void map_documents() {
    for (Rank& r : ranks) {
      if (r.to_right) {
        r.of_last = {r.whole() || p.initial_state ? transition() : View(), offset()};
        state_map(ctx, r.dims, r.in, r.count() - 1, r.of_last);
      }
      if (r.whole()) {
        r.of_first = r.of_last;
      } else if (r.from_left && p.initial_state) {  // for the gradient of its final state
        r.of_first = {transition(), offset()};
        state_map(ctx, r.dims, r.in, 0, r.of_first);
      }
    }
  }

  // Into `state`: what the first document of rank i begins from.
  void fold_left(size_t i, const View& state) const {
    size_t j = i;
    do --j;
    while (ranks[j].whole());
    if (p.initial_state) copy(all.initial_state.at(ranks[i].first), state);
    for (; j < i; ++j) fold(ctx, ranks[j].of_last, state);
  }
  // The gradient of the state that the last document of rank i ends with.
  void fold_right(size_t i, const View& d_state) const {
    size_t j = i;
    do ++j;
    while (ranks[j].whole());
    if (p.initial_state) copy(run.d_outputs[1].at(ranks[i].last), d_state);
    for (; j > i; --j) fold_gradient(ctx, {ranks[j].of_first.transition, ranks[j].d_offset}, d_state);
  }

  void forward_all() {
    for (size_t i = 0; i < ranks.size(); ++i) {
      Rank& r = ranks[i];
      if (p.initial_state) {
        r.in.initial_state = states(r.count());
        if (r.count() > 0) copy(all.initial_state.row_range(r.first, r.count()), r.in.initial_state);
      } else if (r.from_left) {
        r.in.initial_state = states(1);
      }
      if (r.from_left) fold_left(i, r.in.initial_state.at(0));
      r.saved = allocate_saved(ctx, r.dims, r.in.documents, r.in.q.dtype());
      const View last = p.initial_state ? states(r.count()) : View();
      forward(ctx, r.dims, r.in, {run.outputs[0].row_range(r.begin, r.dims.tokens), last}, &r.saved);
      const int64_t ended = r.count() - (r.to_right ? 1 : 0);
      if (p.initial_state && ended > 0) copy(last.row_range(0, ended), run.outputs[1].row_range(r.first, ended));
    }
  }

  void backward_all() {
    const auto d_o = [&](const Rank& r) { return run.d_outputs[0].row_range(r.begin, r.dims.tokens); };
    for (Rank& r : ranks) {
      if (!r.from_left) continue;
      r.d_offset = offset();
      state_gradient_map(ctx, r.dims, r.in, r.saved, d_o(r), 0, r.d_offset);
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      Rank& r = ranks[i];
      OutputGrads d_out{d_o(r), View()};
      if (p.initial_state) {
        d_out.final_state = states(r.count());
        if (r.count() > 0) copy(run.d_outputs[1].row_range(r.first, r.count()), d_out.final_state);
      } else if (r.to_right) {
        d_out.final_state = states(1);
      }
      if (r.to_right) fold_right(i, d_out.final_state.at(d_out.final_state.dim(0) - 1));
      const Inputs whole = bind_inputs(p, run.d_inputs);  // gradients have the shapes of the inputs
      const auto part = [&](const View& v) { return v.row_range(r.begin, r.dims.tokens); };
      const View d_initial = p.initial_state ? states(r.count()) : View();
      backward(ctx, r.dims, r.in, r.saved, d_out,
               {part(whole.q), part(whole.k), part(whole.v), part(whole.z), part(whole.beta_logit), whole.a_log,
                whole.dt_bias, d_initial});
      const int64_t skip = r.from_left ? 1 : 0, begun = r.count() - skip;
      if (p.initial_state && begun > 0) {
        copy(d_initial.row_range(skip, begun), whole.initial_state.row_range(r.first + skip, begun));
      }
    }
  }
};

}  // namespace

void run_sharded(const Problem& p, const std::vector<int64_t>& cuts, const check::Run& r) {
  Ranks all(p, cuts, r);
  all.map_documents();
  all.forward_all();
  if (!r.d_outputs.empty()) all.backward_all();
}

check::Case make_sharded_case(const Problem& p, const std::vector<int64_t>& cuts) {
  check::Case c = make_case(p);
  c.name = fmt::format("cut at {}: {}", fmt::join(cuts, " "), c.name);
  c.run = [=](const check::Run& r) { run_sharded(p, cuts, r); };
  c.reference = [=](const std::vector<Tensor>& in) {
    std::vector<Tensor> out = p.outputs(reference::forward(p.dims, p.values(in)));
    if (!p.initial_state) out.pop_back();
    return out;
  };
  return c;
}

}  // namespace tessera::ops::kda
