#include "ops/mla/op.h"

#include "ops/check/gtest_table.h"
#include "ops/mla/cases.h"

namespace tessera::ops::mla {
namespace {

TESSERA_OP_TABLE_TESTS(Mla, table())

struct Small {
  Arena arena{1 << 24};
  Context ctx{Device::cpu, arena};
  std::vector<int64_t> offsets{0, 3, 5};
  Dims d{5, 2, 4, 2, 3};
  View q = filled({5, 2, 6}), kv = filled({5, 2, 7}), shared = filled({5, 2}), o = filled({5, 2, 3});

  View filled(Shape shape) {
    const View v = arena.allocate(DType::f32, shape);
    for (int64_t i = 0; i < v.elements(); ++i) v.as<float>()[i] = float((i * 37 + v.dim(0)) % 23 - 11) / 8;
    return v;
  }
};

TEST(Mla, MaxLogitIsRaisedNotLowered) {
  Small s;
  const View max_logit = s.arena.allocate_zeroed(DType::f32, {2});
  max_logit.as<float>()[0] = 1e6f;
  max_logit.as<float>()[1] = -1e6f;
  forward(s.ctx, s.d, {s.q, s.kv, s.shared, {s.offsets}}, {s.o, max_logit}, nullptr);
  EXPECT_EQ(max_logit.as<float>()[0], 1e6f);
  EXPECT_GT(max_logit.as<float>()[1], -100.0f);
}

TEST(Mla, SharedKeysMayBeColumnsOfAWiderMatrix) {
  Small s;
  const View wide = s.filled({5, 9}), columns = wide.column_range(7, 2), d_wide = s.filled({5, 9});
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t i = 0; i < 2; ++i) wide.as<float>()[t * 9 + 7 + i] = s.shared.as<float>()[t * 2 + i];
  }
  const View dq = s.filled(s.q.shape()), dkv = s.filled(s.kv.shape()), d_shared = s.filled(s.shared.shape());
  const View d_o = s.filled(s.o.shape());
  const Inputs in{s.q, s.kv, s.shared, {s.offsets}};
  Saved saved = allocate_saved(s.ctx, s.d, DType::f32);
  forward(s.ctx, s.d, in, {s.o, {}}, &saved);
  backward(s.ctx, s.d, in, {s.o, {}}, saved, {d_o}, {dq, dkv, d_shared});
  Inputs strided = in;
  strided.k_shared = columns;
  backward(s.ctx, s.d, strided, {s.o, {}}, saved, {d_o}, {dq, dkv, d_wide.column_range(7, 2)});
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(d_wide.as<float>()[t * 9 + 7 + i], d_shared.as<float>()[t * 2 + i]);
    EXPECT_EQ(d_wide.as<float>()[t * 9], float((t * 9 * 37 + 5) % 23 - 11) / 8) << "columns beside it are not written";
  }
}

TEST(Mla, FlopsCountCausalPairsOfEachDocument) {
  const Dims d{5, 2, 4, 2, 3};
  const std::vector<int64_t> offsets{0, 3, 5};
  const int64_t pairs = 2 * (6 + 3);  // heads x (3 tokens: 6 pairs, 2 tokens: 3 pairs)
  EXPECT_EQ(costs(d, {offsets}, DType::f32, Pass::forward).gemm_flops, pairs * (2 * 6 + 2 * 3));
  EXPECT_EQ(costs(d, {offsets}, DType::f32, Pass::backward).gemm_flops, pairs * (3 * 2 * 6 + 2 * 2 * 3));
}

// A dry run that stands for the GPU: what `tessera plan` is made of, on any machine.
struct DryGpu {
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
  static constexpr int64_t kOffsets[] = {0, 300, 301, 1000};

  View tensor(Shape shape, DType dtype = DType::bf16) { return arena.allocate(dtype, shape); }
  void run(const Dims& d) {
    const View q = tensor({d.tokens, d.heads, d.key_dim()}), kv = tensor({d.tokens, d.heads, d.nope_dim + d.value_dim});
    const View shared = tensor({d.tokens, d.rope_dim}), o = tensor({d.tokens, d.heads, d.value_dim});
    arena.reset_peak();
    const int64_t base = arena.used();
    const Inputs in{q, kv, shared, {kOffsets}};
    Saved saved = allocate_saved(ctx, d, DType::bf16);
    forward(ctx, d, in, {o, tensor({d.heads}, DType::f32)}, &saved);
    backward(ctx, d, in, {o, {}}, saved, {o}, {q, kv, shared});
    taken = arena.peak() - base - Arena::aligned(d.heads * 4);
  }
  void run_decode(const Dims& d, int64_t rank) {
    DecodeInputs in{tensor({d.tokens, d.heads, d.key_dim()}),
                    tensor({d.heads * (d.nope_dim + d.value_dim), rank}),
                    {tensor({7, rank + d.rope_dim}), tensor({900, rank + d.rope_dim})}};
    const View o = tensor({d.tokens, d.heads, d.value_dim});
    arena.reset_peak();
    const int64_t base = arena.used();
    decode(ctx, d, in, o);
    taken = arena.peak() - base;
  }
  int64_t stated() const { return ledger.total().saved_bytes + ledger.total().workspace_bytes; }
  int64_t taken = 0;
};

TEST(Mla, DryRunForTheGpuTakesWhatCostsState) {
  DryGpu expanded;
  expanded.run({1000, 3, 128, 64, 128});
  EXPECT_GT(expanded.taken, 1000 * 3 * (4 + 4 + 64 * 4)) << "lse, delta and the parts of dk_shared are float32";
  EXPECT_LE(expanded.taken, expanded.stated());
  DryGpu absorbed;
  absorbed.run_decode({2, 5, 128, 64, 128}, 512);
  EXPECT_GT(absorbed.taken, 5 * 512 * 4 * (1 + 4)) << "five pieces of 256 keys";
  EXPECT_EQ(absorbed.taken, absorbed.stated());
}

// 32 heads of 2^20 tokens would be 24 GiB of float32 dq: what is summed at a time stays near 512 MiB, or is one head's.
TEST(Mla, TheGpuSumsQueryGradientsOfAFewHeadsAtATime) {
  const auto workspace = [](int64_t tokens, int64_t heads) {
    const std::vector<int64_t> offsets{0, tokens};
    return costs({tokens, heads, 128, 64, 128}, {offsets}, DType::bf16, Pass::backward, Device::cuda).workspace_bytes;
  };
  const auto rows = [](int64_t tokens, int64_t heads) { return tokens * heads * (4 + 4 + 4 + 64 * 4); };
  const int64_t one_long = int64_t{1} << 20, slack = int64_t{1} << 24;
  EXPECT_LE(workspace(one_long, 32), rows(one_long, 32) + one_long * 192 * 4 + slack);
  EXPECT_LE(workspace(32768, 96), rows(32768, 96) + (int64_t{1} << 29) + slack);
  EXPECT_GE(workspace(32768, 16), rows(32768, 16) + int64_t{32768} * 16 * 192 * 4) << "all of 16 heads fit";
}

TEST(Mla, HeadsWiderThanTheGpuHasTilesForAreRefused) {
  DryGpu gpu;
  EXPECT_THROW(gpu.run({1000, 3, 136, 64, 128}), UserError);
  EXPECT_THROW(gpu.run({1000, 3, 128, 64, 136}), UserError);
  EXPECT_THROW(gpu.run_decode({2, 5, 128, 64, 128}, 520), UserError);
}

TEST(Mla, WrongShapesAndEmptyCachesAreRefused) {
  Small s;
  EXPECT_THROW(forward(s.ctx, s.d, {s.q, s.q, s.shared, {s.offsets}}, {s.o, {}}, nullptr), Error);
  const View kv_b = s.filled({14, 8}), q = s.filled({1, 2, 6}), o = s.filled({1, 2, 3});
  Dims one = s.d;
  one.tokens = 1;
  EXPECT_THROW(decode(s.ctx, one, {q, kv_b, {s.arena.allocate(DType::f32, {0, 10})}}, o), Error);
  EXPECT_THROW(decode(s.ctx, one, {q, kv_b, {}}, o), Error);
}

}  // namespace
}  // namespace tessera::ops::mla
