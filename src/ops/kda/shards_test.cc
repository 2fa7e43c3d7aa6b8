// Context parallelism without a communicator: a pack cut into shards, maps folded by hand, against the pack in one go.
#include "ops/kda/shards.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ops/kda/cuda.h"

namespace tessera::ops::kda {
namespace {

using check::Tensor;
using reference::Values;

struct Outcome {
  std::vector<Values> outputs, gradients;
};

View place(Arena& arena, const Tensor& t, DType dtype) {
  const View view = arena.allocate(dtype, Shape(std::span<const int64_t>(t.shape)));
  dispatch_real(dtype, [&](auto real) { std::copy(t.values.begin(), t.values.end(), view.as<decltype(real)>()); });
  return view;
}
Values read(const View& view) {
  Values values(static_cast<size_t>(view.elements()));
  dispatch_real(view.dtype(), [&](auto real) {
    const auto* from = view.as<decltype(real)>();
    std::copy(from, from + view.elements(), values.begin());
  });
  return values;
}

template <class F>
Outcome outcome(const Problem& p, DType dtype, F&& run) {
  Arena arena(int64_t{4} << 30);  // address space only
  arena.set_poison(true);
  Context ctx{Device::cpu, arena};
  std::vector<View> in, out, d_out, d_in;
  for (const Tensor& t : p.tensors()) {
    in.push_back(place(arena, t, dtype));
    d_in.push_back(t.gradient == check::GradientRule::add ? arena.allocate_zeroed(dtype, in.back().shape())
                                                          : arena.allocate(dtype, in.back().shape()));
  }
  std::vector<Tensor> outputs = p.outputs({output_gradient(p), state_gradient(p)});
  if (!p.initial_state) std::fill(outputs[1].values.begin(), outputs[1].values.end(), 0.0);
  for (const Tensor& t : outputs) {
    out.push_back(arena.allocate(dtype, Shape(std::span<const int64_t>(t.shape))));
    d_out.push_back(place(arena, t, dtype));
  }
  run({ctx, in, out, d_out, d_in});
  Outcome r;
  r.outputs.push_back(read(out[0]));
  if (p.initial_state) r.outputs.push_back(read(out[1]));
  for (const View& view : d_in) r.gradients.push_back(read(view));
  return r;
}

void expect_equal(const std::vector<Values>& got, const std::vector<Values>& want, double limit,
                  const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].size(), want[i].size());
    EXPECT_LE(check::relative_error(got[i], want[i]), limit) << what << ' ' << i;
  }
}

void expect_unsharded(const Problem& p, const std::vector<int64_t>& cuts) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    const Outcome want = outcome(p, dtype, [&](const check::Run& r) { run_views(p, r); });
    const Outcome got = outcome(p, dtype, [&](const check::Run& r) { run_sharded(p, cuts, r); });
    const std::string name = fmt::format("{} cut at {} {}", p.name(), fmt::join(cuts, " "), name_of(dtype));
    const double limit = dtype == DType::f64 ? 1e-12 : 1e-5;
    expect_equal(got.outputs, want.outputs, limit, name + " output");
    expect_equal(got.gradients, want.gradients, limit, name + " gradient");
  }
}

// Memory of some hundred tokens: what a document carries over a cut is felt.
Problem pack(std::vector<int64_t> lengths, Gate gate, bool initial_state) {
  return changed(make_problem(std::move(lengths), 2, 16, 16, 32, gate), [&](Problem& p) {
    p.z_shift = -7;
    p.initial_state = initial_state;
  });
}

TEST(KdaShards, EqualOneRank) {
  for (const bool initial_state : {false, true}) {
    for (const Gate gate : {Gate::bounded, Gate::unbounded}) {
      // Two documents shorter than a convolution, an empty one at the first cut, a document over three ranks, one of
      // which it fills, and a tail of one token.
      const Problem p = pack({2, 90, 3, 0, 240, 60, 0, 1}, gate, initial_state);
      const int64_t total = p.dims.tokens;
      expect_unsharded(p, {0, total});
      expect_unsharded(p, {0, 95, total});
      expect_unsharded(p, {0, 150, total});
      expect_unsharded(p, {0, 100, 200, total});
      expect_unsharded(p, {0, 94, 110, 300, total});
      expect_unsharded(p, {0, 95, 335, 395, total});  // every cut between documents
      expect_unsharded(p, {0, 1, 2, 395, total});     // a rank of one token, a tail of one
      expect_unsharded(p, {0, 200, 200, total});      // a rank without tokens
    }
  }
}

TEST(KdaShards, OneDocumentOverAllRanks) {
  expect_unsharded(pack({257}, Gate::bounded, false), {0, 64, 128, 192, 257});
  expect_unsharded(pack({257}, Gate::bounded, true), {0, 1, 100, 256, 257});
}

TEST(KdaShards, GroupedHeadsAndOtherWidths) {
  Problem p = pack({30, 100}, Gate::bounded, true);
  p.dims.value_heads = 4;
  p.dims.key_dim = 20;
  p.dims.value_dim = 12;
  p.dims.negative_eigenvalues = true;
  expect_unsharded(p, {0, 40, 90, 130});
}

// A state of one document alone is that of the first, or of the last, among zeros.
TEST(KdaShards, StatesOfTheDocumentsAtTheEnds) {
  const Problem p = pack({40, 3, 70}, Gate::bounded, true);
  const Outcome all = outcome(p, DType::f64, [&](check::Run r) {
    r.inputs[7].row_range(1, 2).zero();
    r.d_outputs[1].row_range(0, 2).zero();
    run_views(p, r);
  });
  const Outcome ends = outcome(p, DType::f64, [&](check::Run r) {
    r.outputs[1].zero();
    std::vector<View> in(r.inputs.begin(), r.inputs.end()), out(r.outputs.begin(), r.outputs.end());
    std::vector<View> d_out(r.d_outputs.begin(), r.d_outputs.end()), d_in(r.d_inputs.begin(), r.d_inputs.end());
    in[7] = in[7].row_range(0, 1), d_in[7] = d_in[7].row_range(0, 1);
    out[1] = out[1].row_range(2, 1), d_out[1] = d_out[1].row_range(2, 1);
    run_views(p, {r.context, in, out, d_out, d_in});
  });
  EXPECT_EQ(ends.outputs[0], all.outputs[0]);
  for (size_t i = 0; i < 7; ++i) EXPECT_EQ(ends.gradients[i], all.gradients[i]);
  const int64_t row = 2 * 16 * 16;
  for (int64_t i = 0; i < row; ++i) {
    EXPECT_EQ(ends.outputs[1][size_t(2 * row + i)], all.outputs[1][size_t(2 * row + i)]);
    EXPECT_EQ(ends.outputs[1][size_t(i)], 0);
    EXPECT_EQ(ends.gradients[7][size_t(i)], all.gradients[7][size_t(i)]);
  }
}

TEST(KdaShards, CostsOfAMap) {
  constexpr int64_t kDim = 128, kTokens = 6400, kChunk = 64;
  const std::vector<int64_t> offsets{0, 77, kTokens + 77};
  const Dims d{.tokens = kTokens + 77, .heads = 3, .value_heads = 3, .key_dim = kDim, .value_dim = kDim};
  const auto flops = [&](bool transition, Pass pass) {
    const Costs c = map_costs(d, {offsets}, 1, transition, DType::f32, pass);
    return static_cast<int64_t>(c.gemm_flops / (3 * kTokens));
  };
  EXPECT_EQ(flops(false, Pass::forward), 4 * kDim * kDim + 2 * kChunk * kDim);
  EXPECT_EQ(flops(true, Pass::forward), 8 * kDim * kDim + 3 * kChunk * kDim);
  EXPECT_EQ(flops(false, Pass::backward), 6 * kDim * kDim + 2 * kChunk * kDim);
}

TEST(KdaShards, DryRunForAGpuTakesWhatCostsState) {
  const int64_t piece = cuda::kSegment * cuda::kChunk;
  for (const int64_t length : {int64_t{0}, int64_t{100}, 3 * piece}) {
    const Problem p = changed(make_problem({1, length, 5}, 2, 64, 64, 64), [](Problem& q) { q.distinct_rows = 1; });
    Arena arena = Arena::dry();
    Ledger ledger;
    Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
    std::vector<View> views;
    for (const Tensor& t : p.tensors()) {
      views.push_back(arena.allocate(t.exact ? DType::f32 : DType::bf16, Shape(std::span<const int64_t>(t.shape))));
    }
    const std::vector<int64_t> offsets = p.offsets();
    Inputs in = bind_inputs(p, views);
    in.documents = {offsets};
    const StateMap map{arena.allocate(DType::f32, {2, 64, 64}), arena.allocate(DType::f32, {2, 64, 64})};
    const int64_t before = arena.used();
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      ledger.clear();
      arena.reset_peak();
      if (pass == Pass::forward) {
        state_map(ctx, p.dims, in, 1, map);
      } else {
        state_gradient_map(ctx, p.dims, in, {}, in.v, 1, map.offset);
      }
      EXPECT_EQ(arena.peak() - before, ledger.total().workspace_bytes) << length;
    }
    fold(ctx, map, map.offset);
    EXPECT_EQ(arena.used(), before);
  }
}

TEST(KdaShards, RefusesWhatItCannotDo) {
  const Problem p = pack({5, 6}, Gate::bounded, false);
  outcome(p, DType::f64, [&](const check::Run& r) {
    Inputs in = bind_inputs(p, r.inputs);
    const std::vector<int64_t> offsets = p.offsets();
    in.documents = {offsets};
    const View state = r.context.arena.allocate_zeroed(DType::f64, {2, 16, 16});
    const View square = r.context.arena.allocate_zeroed(DType::f64, {2, 16, 16});
    EXPECT_NO_THROW(state_map(r.context, p.dims, in, 1, {square, state}));
    EXPECT_THROW(state_map(r.context, p.dims, in, 2, {square, state}), Error);
    EXPECT_THROW(state_map(r.context, p.dims, in, 0, {square, state.row_range(0, 1)}), Error);
    EXPECT_THROW(fold(r.context, {square.row_range(0, 1), state}, state), Error);
    in.initial_state = r.context.arena.allocate_zeroed(DType::f64, {3, 2, 16, 16});
    EXPECT_THROW(forward(r.context, p.dims, in, {r.outputs[0], View()}, nullptr), Error);
  });
}

}  // namespace
}  // namespace tessera::ops::kda
