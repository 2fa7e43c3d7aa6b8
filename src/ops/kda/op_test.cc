// The table, every length that the spec lists, packs, and what the op states and refuses.
#include <array>
#include <numeric>

#include "core/parallel.h"
#include "ops/check/gtest_table.h"
#include "ops/kda/cases.h"
#include "ops/kda/cuda.h"
#include "ops/kda/problem.h"

namespace tessera::ops::kda {
namespace {

using reference::Values;

TESSERA_OP_TABLE_TESTS(Kda, table())

// float64 and float32 against the token recurrence and its backward.
void expect_recurrence(const Problem& p, double limit_f64 = 1e-12, double limit_f32 = 1e-4) {
  const reference::Inputs in = p.values();
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  const Result want = run_reference(p, in, d_o, d_final);
  EXPECT_LE(difference(run_values(p, in, DType::f64, d_o, d_final), want), limit_f64) << p.name();
  EXPECT_LE(difference(run_values(p, in, DType::f32, d_o, d_final), want), limit_f32) << p.name();
}

TEST(Kda, EveryLength) {
  for (const int64_t tokens : {0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 1000}) {
    for (const int64_t chunk : {16, 32, 64}) {
      expect_recurrence(make_problem({tokens}, 1, 16, 16, chunk, tokens % 2 == 0 ? Gate::bounded : Gate::unbounded));
    }
  }
}

TEST(Kda, LongMemory) {
  Problem p = make_problem({4097}, 1, 32, 32, 64);
  p.z_shift = -7;  // gates near -0.005: a memory of many chunks
  expect_recurrence(p);
}

TEST(Kda, ReleasedWidths) {
  expect_recurrence(make_problem({150}, 1, 128, 128, 64));
  expect_recurrence(make_problem({150}, 1, 128, 128, 64, Gate::unbounded));
}

TEST(Kda, Packs) {
  expect_recurrence(make_problem({0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 1000, 1, 0}, 2, 16, 16, 64));
  expect_recurrence(make_problem({1300, 1}, 2, 16, 16, 32));  // a one-token tail, in another part
  expect_recurrence(make_problem(std::vector<int64_t>(50, 1), 2, 16, 16, 64));
  expect_recurrence(make_problem({0, 0, 0}, 2, 16, 16, 64));
}

TEST(Kda, OtherWidthsAndGroupedHeads) {
  Problem p = make_problem({70, 3}, 2, 20, 33, 64);
  expect_recurrence(p);
  p.dims.value_heads = 6;
  p.dims.scale = 0.7;
  expect_recurrence(p);
  p.initial_state = p.has_a_log = false;
  expect_recurrence(p);
}

TEST(Kda, DecodeOfSeveralSequences) {
  Problem p = make_problem({9, 9, 9}, 2, 20, 12, 16, Gate::unbounded);
  p.dims.value_heads = 4;
  p.dims.negative_eigenvalues = true;
  const reference::Inputs in = p.values();
  const reference::Outputs want = reference::forward(p.dims, in), got = run_steps(p, in, DType::f64);
  EXPECT_LE(check::relative_error(got.o, want.o), 1e-12);
  EXPECT_LE(check::relative_error(got.final_state, want.final_state), 1e-12);
}

TEST(Kda, FinalStateInPlaceOfInitialState) {
  const Problem p = make_problem({70, 0, 5}, 2, 16, 16, 64);
  Arena arena(1 << 24);
  Context ctx{Device::cpu, arena};
  const std::vector<check::Tensor> tensors = p.tensors();
  std::vector<View> in;
  for (const auto& t : tensors) {
    in.push_back(arena.allocate(DType::f64, Shape(std::span<const int64_t>(t.shape))));
    std::copy(t.values.begin(), t.values.end(), in.back().as<double>());
  }
  const View o = arena.allocate(DType::f64, in[2].shape()), o2 = arena.allocate(DType::f64, in[2].shape());
  const View state = arena.allocate(DType::f64, in[7].shape());
  const std::vector<View> apart{o, state}, in_place{o2, in[7]};
  run_views(p, {ctx, in, apart, {}, {}});
  run_views(p, {ctx, in, in_place, {}, {}});
  for (int64_t i = 0; i < o.elements(); ++i) ASSERT_EQ(o.as<double>()[i], o2.as<double>()[i]);
  for (int64_t i = 0; i < state.elements(); ++i) ASSERT_EQ(state.as<double>()[i], in[7].as<double>()[i]);
}

TEST(Kda, FlopsOfTheFormula) {
  // 6 d^2 + 3 C d + C^2 a token and head: 126,976 for d = 128 at C = 64 and 104,704 at C = 16.
  const std::vector<int64_t> offsets{0, 6400};
  const auto flops = [&](int64_t chunk, Pass pass, Device back_end) {
    const Dims d{.tokens = 6400, .heads = 3, .value_heads = 3, .key_dim = 128, .value_dim = 128, .chunk = chunk};
    const DType dtype = back_end == Device::cuda ? DType::bf16 : DType::f32;
    return static_cast<int64_t>(costs(d, {offsets}, dtype, pass, back_end).gemm_flops / (6400 * 3));
  };
  EXPECT_EQ(flops(64, Pass::forward, Device::cpu), 126976);
  EXPECT_EQ(flops(16, Pass::forward, Device::cpu), 104704);
  EXPECT_EQ(flops(64, Pass::backward, Device::cpu), 12 * 128 * 128 + 8 * 64 * 128);
  for (const int64_t chunk : {16, 64}) EXPECT_EQ(flops(chunk, Pass::forward, Device::cuda), 126976);
}

TEST(Kda, WorkspaceIsBoundedByTokensNotByDocuments) {
  const Dims d{.tokens = 1 << 20, .heads = 4, .value_heads = 4, .key_dim = 32, .value_dim = 32};
  const std::vector<int64_t> whole{0, d.tokens};
  std::vector<int64_t> single(static_cast<size_t>(d.tokens) + 1);
  std::iota(single.begin(), single.end(), 0);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int64_t one = costs(d, {whole}, DType::f32, pass).workspace_bytes;
    EXPECT_EQ(costs(d, {single}, DType::f32, pass).workspace_bytes, one);
    EXPECT_LT(one, thread_count() * (int64_t{1} << 20) + d.tokens * 4);
  }
}

TEST(Kda, PlanOfAGpuCutsLongDocumentsAtTheSameTokens) {
  const auto plan_of = [](int64_t heads, std::vector<int64_t> lengths) {
    const Problem p = make_problem(std::move(lengths), heads, 128, 128, 64);
    const std::vector<int64_t> offsets = p.offsets();
    return cuda::plan(p.dims, {offsets});
  };
  constexpr int64_t kTokens = cuda::kSegment * cuda::kChunk;
  const cuda::Plan none = plan_of(4, {0, 1, 2 * kTokens, 0, 65});
  EXPECT_EQ(none.chunks, 1 + 2 * cuda::kSegment + 2);
  EXPECT_EQ(none.pieces, 5);  // empty documents have one too: their final state is written
  EXPECT_FALSE(none.cut);
  const cuda::Plan three = plan_of(4, {2 * kTokens + 1, 7});
  EXPECT_EQ(three.pieces, 3 + 1);
  EXPECT_TRUE(three.cut);
  EXPECT_EQ(plan_of(4, {5 * kTokens}).pieces, 5);
  const cuda::Plan many_heads = plan_of(96, {5 * kTokens});  // the heads fill the GPU
  EXPECT_EQ(many_heads.pieces, 1);
  EXPECT_FALSE(many_heads.cut);
}

// What a GPU would be given, planned without one.
TEST(Kda, DryRunForAGpu) {
  const auto run = [](const Problem& p) {
    Arena arena = Arena::dry();
    Ledger ledger;
    Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
    std::vector<View> in, out;
    for (const auto& t : p.tensors()) {
      in.push_back(arena.allocate(t.exact ? DType::f32 : DType::bf16, Shape(std::span<const int64_t>(t.shape))));
    }
    for (const auto& t : p.outputs({})) {
      out.push_back(arena.allocate(t.exact ? DType::f32 : DType::bf16, Shape(std::span<const int64_t>(t.shape))));
    }
    const std::vector<int64_t> offsets = p.offsets();
    Inputs inputs = bind_inputs(p, in);
    inputs.documents = {offsets};
    Saved saved = allocate_saved(ctx, p.dims, inputs.documents, DType::bf16);
    EXPECT_FALSE(saved.inverse.present() || saved.states.present());
    const Grads grads{in[0], in[1], in[2], in[3], in[4], in[6], in[5], in[7]};
    const int64_t before = arena.used();
    std::array<int64_t, 2> taken;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      arena.reset_peak();
      ledger.clear();
      if (pass == Pass::forward) {
        forward(ctx, p.dims, inputs, {out[0], out[1]}, &saved);
      } else {
        backward(ctx, p.dims, inputs, saved, {out[0], out[1]}, grads);
      }
      EXPECT_EQ(arena.used(), before);
      const Costs total = ledger.total();
      taken[size_t(pass)] = total.workspace_bytes;
      EXPECT_EQ(arena.peak() - before, total.workspace_bytes) << p.name();
      EXPECT_EQ(total.saved_bytes, 0);
    }
    return taken;
  };
  const auto planned = [](std::vector<int64_t> lengths, int64_t heads, int64_t dim) {
    return changed(make_problem(std::move(lengths), heads, dim, dim, 16), [](Problem& p) { p.distinct_rows = 1; });
  };
  run(planned({65, 0, 1}, 2, 32));
  run(planned({3 * cuda::kSegment * cuda::kChunk}, 2, 64));
  const auto [of_forward, of_backward] = run(planned({8192}, 96, 128));
  EXPECT_LT(of_forward, int64_t{1} << 30);
  EXPECT_LT(of_backward, int64_t{2} << 30);
  const auto refused = [&](const Problem& p) { EXPECT_THROW(run(p), UserError) << p.name(); };
  refused(make_problem({5}, 2, 16, 16, 64));
  refused(make_problem({5}, 2, 64, 32, 64));
  refused(changed(make_problem({5}, 2, 64, 64, 64), [](Problem& p) { p.dims.value_heads = 4; }));
}

TEST(Kda, ShapesPastTwoToThe31RunDry) {
  const int64_t tokens = 200'000;
  const Dims d{.tokens = tokens, .heads = 96, .value_heads = 96, .key_dim = 128, .value_dim = 128};
  Arena arena = Arena::dry();
  Context ctx{Device::dry, arena};
  const std::vector<int64_t> offsets{0, 1, tokens};
  const auto take = [&](Shape shape) { return arena.allocate(DType::f32, shape); };
  const Shape wide{tokens, 96, 128};
  const Inputs in{take(wide), take(wide),      take(wide), take(wide), take({tokens, 96}),
                  View(),     take({96, 128}), View(),     {offsets}};
  Saved saved = allocate_saved(ctx, d, in.documents, DType::f32);
  EXPECT_EQ(saved.states.dim(0), 1 + (tokens - 1 + 63) / 64);
  const int64_t before = arena.used();
  forward(ctx, d, in, {take(wide), View()}, &saved);
  backward(ctx, d, in, saved, {take(wide), View()},
           {take(wide), take(wide), take(wide), take(wide), take({tokens, 96}), View(), take({96, 128}), View()});
  EXPECT_GT(arena.peak(), before);
}

TEST(Kda, RefusesWhatItCannotDo) {
  const auto run = [](Problem p) {
    const reference::Inputs in = p.values();
    run_values(p, in, DType::f64, output_gradient(p), {});
  };
  Problem p = make_problem({5}, 2, 16, 16, 64);
  EXPECT_NO_THROW(run(p));
  const auto refused = [&](auto change) {
    Problem wrong = p;
    change(wrong);
    EXPECT_THROW(run(wrong), Error);
  };
  refused([](Problem& w) { w.dims.chunk = 48; });
  refused([](Problem& w) { w.dims.lower_bound = -6; });
  refused([](Problem& w) { w.dims.lower_bound = 0; });
  refused([](Problem& w) { w.dims.value_heads = 3; });
  refused([](Problem& w) {
    w.dims.gate = Gate::unbounded;
    w.has_a_log = false;
  });
}

}  // namespace
}  // namespace tessera::ops::kda
