#include "ops/cross_entropy/op.h"

#include <cmath>

#include "core/philox.h"
#include "ops/check/gtest_table.h"
#include "ops/cross_entropy/cases.h"
#include "ops/gemm/cuda.h"

namespace tessera::ops::cross_entropy {
namespace {

TESSERA_OP_TABLE_TESTS(CrossEntropy, table())

struct Head {
  Dims d;
  Arena arena{1 << 26};
  Ledger ledger;
  Context ctx;
  Inputs in;
  Outputs out;
  Grads grads;

  explicit Head(const Dims& dims, Product product = Product::f32) : d(dims), ctx{Device::cpu, arena, &ledger, product} {
    arena.set_poison(true);
    in = {normal({d.tokens, d.width}, 1), normal({d.vocabulary, d.width}, 2), arena.allocate(DType::i32, {d.tokens})};
    for (int64_t t = 0; t < d.tokens; ++t) {
      in.targets.as<int32_t>()[t] = t % 3 == 1 ? -1 : static_cast<int32_t>(t * 37 % d.vocabulary);
    }
    out.loss = arena.allocate(DType::f32, {d.tokens});
    grads = {arena.allocate(DType::f32, {d.tokens, d.width}),
             arena.allocate_zeroed(DType::f32, {d.vocabulary, d.width})};
  }

  View normal(Shape shape, uint64_t seed) {
    const View v = arena.allocate(DType::f32, shape);
    const Philox philox(seed, Purpose::test);
    for (int64_t i = 0; i < v.elements(); ++i) v.as<float>()[i] = float(philox.normal(static_cast<uint64_t>(i)));
    return v;
  }
  // Memory the call took from the arena.
  int64_t run(double scale = 1.0) {
    const int64_t used = arena.used();
    arena.reset_peak();
    forward_backward(ctx, d, in, scale, out, grads);
    return arena.peak() - used;
  }
};

std::vector<double> values(const View& v) { return {v.as<float>(), v.as<float>() + v.elements()}; }
double difference(const View& got, const View& want) { return check::relative_error(values(got), values(want)); }

TEST(CrossEntropy, BlocksAgreeAndTheLastMayBeShort) {
  const Dims whole{53, 24, 101, 53};
  Head one(whole);
  one.run(0.5);
  for (int64_t rows : {1, 7, 16, 52, 64}) {
    Head blocks({whole.tokens, whole.width, whole.vocabulary, rows});
    blocks.run(0.5);
    EXPECT_LE(difference(blocks.out.loss, one.out.loss), 1e-6) << rows;
    EXPECT_LE(difference(blocks.grads.x, one.grads.x), 1e-6) << rows;
    EXPECT_LE(difference(blocks.grads.weight, one.grads.weight), 1e-6) << rows;
  }
}

TEST(CrossEntropy, WorkspaceIsOneBlockOfLogits) {
  const int64_t block = Arena::aligned(8 * 301 * 4);
  for (int64_t tokens : {8, 64, 100}) {
    Head head({tokens, 16, 301, 8});
    EXPECT_EQ(head.run(), block) << tokens;
    EXPECT_EQ(costs(head.d, DType::f32, Pass::forward, Product::f32).workspace_bytes, block);
    EXPECT_EQ(costs(head.d, DType::f32, Pass::backward, Product::f32).workspace_bytes, block);
  }
  Head few({3, 16, 301, 8});  // fewer tokens than a block: not more than they need
  EXPECT_EQ(few.run(), Arena::aligned(3 * 301 * 4));
  // A million tokens of a real vocabulary: offsets beyond 2^31, workspace of a block.
  const Dims million{int64_t{1} << 20, 2304, 163840, 1024};
  EXPECT_EQ(costs(million, DType::f32, Pass::backward, Product::f32).workspace_bytes, int64_t{1024} * 163840 * 4);
  EXPECT_EQ(costs(million, DType::f32, Pass::backward, Product::f32).gemm_flops,
            6 * (int64_t{1} << 20) * 2304 * 163840);
}

TEST(CrossEntropy, ForwardGivesTheLossOfForwardBackward) {
  Head head({29, 16, 70, 8});
  head.run();
  const View loss = head.arena.allocate(DType::f32, {head.d.tokens});
  forward(head.ctx, head.d, head.in, {loss});
  EXPECT_LE(difference(loss, head.out.loss), 1e-7);
}

TEST(CrossEntropy, TokensWithoutTargetHaveNoLossAndNoGradient) {
  Head head({29, 16, 70, 8});
  head.run();
  for (int64_t t = 0; t < head.d.tokens; ++t) {
    const bool masked = head.in.targets.as<int32_t>()[t] < 0;
    EXPECT_EQ(head.out.loss.as<float>()[t] == 0.0f, masked) << t;
    for (int64_t i = 0; i < head.d.width; ++i) {
      EXPECT_EQ(head.grads.x.as<float>()[t * head.d.width + i] == 0.0f, masked) << t;
    }
  }
}

TEST(CrossEntropy, LargeLogitsStayFinite) {
  // Logits of +-1e4: token 0 aims at the largest, token 1 at the smallest, token 2 sees all equal.
  Head head({3, 1, 4, 2});
  const float x[] = {1e4f, 1e4f, 0.0f}, weight[] = {1.0f, -1.0f, 0.5f, -1.0f};
  std::copy_n(x, 3, head.in.x.as<float>());
  std::copy_n(weight, 4, head.in.weight.as<float>());
  head.in.targets.as<int32_t>()[0] = 0;
  head.in.targets.as<int32_t>()[1] = 1;
  head.in.targets.as<int32_t>()[2] = 3;
  head.run();
  const float *loss = head.out.loss.as<float>(), *dx = head.grads.x.as<float>(), *dw = head.grads.weight.as<float>();
  EXPECT_EQ(loss[0], 0.0f);
  EXPECT_EQ(loss[1], 2e4f);
  EXPECT_NEAR(loss[2], std::log(4.0), 1e-6);
  EXPECT_EQ(dx[0], 0.0f);
  EXPECT_EQ(dx[1], 2.0f);  // 1 * w[0] - 1 * w[1]
  EXPECT_NEAR(dx[2], (1.0 - 1.0 + 0.5 - 1.0) / 4 + 1.0, 1e-6);
  EXPECT_EQ(dw[0], 1e4f);
  EXPECT_EQ(dw[1], -1e4f);
  EXPECT_EQ(dw[2], 0.0f);
}

TEST(CrossEntropy, WeightGradientAddsAndScaleScales) {
  Head one({20, 16, 70, 8}), more({20, 16, 70, 8});
  one.run(1.0);
  more.run(2.0);
  more.run(0.5);  // dW: 2.5 in all; dx: of the last call
  for (int64_t i = 0; i < one.grads.weight.elements(); ++i) {
    EXPECT_NEAR(more.grads.weight.as<float>()[i], 2.5f * one.grads.weight.as<float>()[i], 1e-5);
  }
  for (int64_t i = 0; i < one.grads.x.elements(); ++i) {
    EXPECT_NEAR(more.grads.x.as<float>()[i], 0.5f * one.grads.x.as<float>()[i], 1e-6);
  }
}

TEST(CrossEntropy, ForAGpuOnlyTheLogitsOfABlockAreFloat32) {
  const Dims d{100, 16, 301, 8};
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
  const Inputs in{arena.allocate(DType::bf16, {d.tokens, d.width}),
                  arena.allocate(DType::bf16, {d.vocabulary, d.width}), arena.allocate(DType::i32, {d.tokens})};
  const Outputs out{arena.allocate(DType::f32, {d.tokens})};
  const Grads grads{arena.allocate(DType::bf16, {d.tokens, d.width}),
                    arena.allocate(DType::f32, {d.vocabulary, d.width})};
  const int64_t used = arena.used();
  forward_backward(ctx, d, in, 1, out, grads);
  EXPECT_EQ(arena.peak() - used, Arena::aligned(8 * 301 * 4) + kGemmWorkspaceBytes);
  EXPECT_EQ(arena.peak() - used, ledger.total().workspace_bytes);
  // x and dx, the weight once, the gradient of the logits written and read twice; the weight's gradient read and
  // written, logits written and read; losses and targets.
  EXPECT_EQ(ledger.total().bytes_moved,
            2 * (2 * 100 * 16 + 301 * 16 + 3 * 100 * 301) + 4 * (2 * 301 * 16 + 2 * 100 * 301) + 100 * (4 + 4));
  EXPECT_THROW(forward(ctx, d, in, {arena.allocate(DType::bf16, {d.tokens})}), Error) << "losses are exact";
}

TEST(CrossEntropy, ATargetOutsideTheVocabularyIsRefused) {
  for (int32_t target : {-2, 70}) {
    Head head({20, 16, 70, 8});
    head.in.targets.as<int32_t>()[11] = target;
    EXPECT_THROW(head.run(), Error);
  }
}

TEST(CrossEntropy, Bf16Products) {
  if (!cpu_has_bf16_products()) GTEST_SKIP() << "this CPU has no bf16 products";
  // Operands carry 8 bits: logits are off by about 2e-3 of their own size, here 5.
  Head exact({50, 24, 130, 16}), rounded({50, 24, 130, 16}, Product::bf16);
  exact.run();
  EXPECT_EQ(rounded.run(), costs(rounded.d, DType::f32, Pass::backward, Product::bf16).workspace_bytes);
  EXPECT_LE(difference(rounded.out.loss, exact.out.loss), 5e-3);
  EXPECT_LE(difference(rounded.grads.x, exact.grads.x), 2e-2);
  EXPECT_LE(difference(rounded.grads.weight, exact.grads.weight), 2e-2);
  EXPECT_GT(difference(rounded.grads.x, exact.grads.x), 1e-5) << "the operands were not rounded";
}

}  // namespace
}  // namespace tessera::ops::cross_entropy
