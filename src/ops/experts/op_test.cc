#include "ops/experts/op.h"

#include <cmath>
#include <cstring>

#include "core/parallel.h"
#include "ops/check/gtest_table.h"
#include "ops/experts/cases.h"
#include "ops/experts/plan.h"
#include "ops/gemm/gemm.h"

namespace tessera::ops::experts {
namespace {

constexpr glu::Activation kSitu{.kind = glu::Kind::situ};

TESSERA_OP_TABLE_TESTS(Experts, table())

// One batch in float32, poisoned, with all gradients.
struct Batch {
  Dims d;
  Arena arena{int64_t{1} << 30};
  Ledger ledger;
  Context ctx;
  Inputs in;
  Outputs out;
  OutputGrads dout;
  Grads grads;
  Saved saved;

  Batch(const Dims& dims, Routing routing, Product product = Product::f32)
      : d(dims), ctx{Device::cpu, arena, &ledger, product} {
    arena.set_poison(true);
    const auto t = make_inputs(d, routing);
    in = {view(t[0]), indices(t[1]), view(t[2]), view(t[3]), view(t[4]), view(t[5])};
    out = {arena.allocate(DType::f32, {d.tokens, d.width})};
    dout = {view(check::random_tensor("dy", {d.tokens, d.width}))};
    grads = {arena.allocate(DType::f32, {d.tokens, d.width}), arena.allocate(DType::f32, {d.tokens, d.top_k}),
             arena.allocate_zeroed(DType::f32, in.w1.shape()), arena.allocate_zeroed(DType::f32, in.w3.shape()),
             arena.allocate_zeroed(DType::f32, in.w2.shape())};
    saved = allocate_saved(ctx, d, DType::f32);
  }
  View view(const check::Tensor& t) {
    const View v = arena.allocate(DType::f32, Shape(std::span<const int64_t>(t.shape)));
    std::copy(t.values.begin(), t.values.end(), v.as<float>());
    return v;
  }
  View indices(const check::Tensor& t) {
    const View v = arena.allocate(DType::i32, {d.tokens, d.top_k});
    std::copy(t.values.begin(), t.values.end(), v.as<int32_t>());
    return v;
  }
  void run() {
    forward(ctx, d, in, out, &saved);
    backward(ctx, d, in, saved, dout, grads);
  }
};

bool same_bits(const View& a, const View& b) { return std::memcmp(a.data(), b.data(), size_t(a.bytes())) == 0; }

double difference(const View& a, const View& b) {
  const auto values = [](const View& v) { return std::vector<double>(v.as<float>(), v.as<float>() + v.elements()); };
  return check::relative_error(values(a), values(b));
}

// Expert e of `from` becomes expert (e + 3) mod E.
void rotate_experts(const Batch& from, Batch& to) {
  const int64_t experts = from.d.experts;
  for (int64_t slot = 0; slot < rows_of(from.d); ++slot) {
    const int32_t e = from.in.indices.as<int32_t>()[slot];
    to.in.indices.as<int32_t>()[slot] = e < 0 ? e : int32_t((e + 3) % experts);
  }
  const auto rotate = [&](const View& a, const View& b) {
    for (int64_t e = 0; e < experts; ++e) {
      std::memcpy(b.at((e + 3) % experts).data(), a.at(e).data(), size_t(a.at(e).bytes()));
    }
  };
  rotate(from.in.w1, to.in.w1);
  rotate(from.in.w3, to.in.w3);
  rotate(from.in.w2, to.in.w2);
}

TEST(Experts, PermutedExpertsGiveTheSameBits) {
  const Dims d{600, 8, 3, 24, 20, kSitu};
  for (Routing routing : {Routing::spread, Routing::crowded, Routing::half_used}) {
    Batch a(d, routing), b(d, routing);
    rotate_experts(a, b);
    a.run();
    b.run();
    EXPECT_TRUE(same_bits(a.out.y, b.out.y));
    EXPECT_TRUE(same_bits(a.grads.x, b.grads.x));
    EXPECT_TRUE(same_bits(a.grads.weights, b.grads.weights));
    for (int64_t e = 0; e < d.experts; ++e) {
      EXPECT_TRUE(same_bits(a.grads.w2.at(e), b.grads.w2.at((e + 3) % d.experts))) << e;
    }
  }
}

TEST(Experts, ThreadsDoNotChangeTheBits) {
  const Dims d{3000, 6, 2, 16, 24, kSitu};
  const int threads = thread_count();
  Batch one(d, Routing::crowded);
  set_thread_count(1);
  one.run();
  for (int n : {2, 3}) {
    set_thread_count(n);
    Batch many(d, Routing::crowded);
    many.run();
    EXPECT_TRUE(same_bits(one.out.y, many.out.y)) << n;
    EXPECT_TRUE(same_bits(one.grads.x, many.grads.x)) << n;
    EXPECT_TRUE(same_bits(one.grads.w1, many.grads.w1)) << n;
    EXPECT_TRUE(same_bits(one.grads.w2, many.grads.w2)) << n;
  }
  set_thread_count(threads);
}

TEST(Experts, ExpertsWithoutTokensKeepTheirGradient) {
  const Dims d{64, 6, 2, 8, 10, kSitu};
  Batch b(d, Routing::half_used);
  for (const View& w : {b.grads.w1, b.grads.w3, b.grads.w2}) std::fill_n(w.as<float>(), w.elements(), 0.5f);
  b.run();
  for (const View& w : {b.grads.w1, b.grads.w3, b.grads.w2}) {
    for (int64_t e = 0; e < d.experts; ++e) {
      const float* g = w.at(e).as<float>();
      const int64_t untouched = std::count(g, g + w.at(e).elements(), 0.5f);
      if (e % 2 == 1) {
        EXPECT_EQ(untouched, w.at(e).elements()) << e;
      } else {
        EXPECT_LT(untouched, 3) << e;
      }
    }
  }
  for (int64_t i = 0; i < d.width; ++i) EXPECT_EQ(b.out.y.as<float>()[i], 0.0f) << "token 0 is routed nowhere";
  for (int64_t i = 0; i < d.width; ++i) EXPECT_EQ(b.grads.x.as<float>()[i], 0.0f);
  EXPECT_EQ(b.grads.weights.as<float>()[0], 0.0f);
}

TEST(Experts, EverySlotEmpty) {
  const Dims d{5, 3, 2, 4, 6, kSitu};
  Batch b(d, Routing::spread);
  std::fill_n(b.in.indices.as<int32_t>(), 10, -1);
  b.run();
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(b.out.y.as<float>()[i], 0.0f);
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(b.grads.x.as<float>()[i], 0.0f);
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(b.grads.weights.as<float>()[i], 0.0f);
}

TEST(Experts, InferenceGivesTheSameBits) {
  const Dims d{70, 6, 3, 12, 10, kSitu};
  Batch b(d, Routing::half_used);
  const View y = b.arena.allocate(DType::f32, {d.tokens, d.width});
  forward(b.ctx, d, b.in, b.out, &b.saved);
  forward(b.ctx, d, b.in, {y}, nullptr);
  EXPECT_TRUE(same_bits(b.out.y, y));
}

TEST(Experts, SquaresAddUpAndLeaveTheOutputsAlone) {
  const Dims d{3000, 6, 2, 16, 24, kSitu};
  const int threads = thread_count();
  Batch plain(d, Routing::half_used), one(d, Routing::half_used), many(d, Routing::half_used);
  plain.run();
  for (Batch* b : {&one, &many}) {
    set_thread_count(b == &one ? 1 : 3);
    b->out.squares = b->arena.allocate_zeroed(DType::f64, {d.experts});
    b->run();
    EXPECT_TRUE(same_bits(b->out.y, plain.out.y));
    EXPECT_TRUE(same_bits(b->grads.w2, plain.grads.w2));
  }
  set_thread_count(threads);
  EXPECT_TRUE(same_bits(one.out.squares, many.out.squares));
  const std::vector<double> once(one.out.squares.as<double>(), one.out.squares.as<double>() + d.experts);
  forward(one.ctx, d, one.in, one.out, nullptr);
  for (size_t e = 0; e < once.size(); ++e) {
    EXPECT_EQ(one.out.squares.as<double>()[e], 2 * once[e]);
    EXPECT_EQ(once[e] > 0, e % 2 == 0) << "odd experts have no tokens";
  }
}

TEST(Experts, TokensAloneGiveTheTokensOfTheBatch) {
  const Dims d{40, 6, 3, 16, 8, kSitu};
  Batch b(d, Routing::spread);
  b.run();
  Dims one = d;
  one.tokens = 1;
  const View y = b.arena.allocate(DType::f32, {1, d.width});
  for (int64_t t : {0, 17, 39}) {
    Inputs in = b.in;
    in.x = in.x.row_range(t, 1);
    in.indices = in.indices.row_range(t, 1);
    in.weights = in.weights.row_range(t, 1);
    forward(b.ctx, one, in, {y}, nullptr);
    EXPECT_LT(difference(y, b.out.y.row_range(t, 1)), 1e-6) << t;
  }
}

// RMS error of the gradient of the mixing weights over |dy| |y|, the size of their sums <dy, y> before they cancel: one
// that cancels alone has no digits of its own to compare.
double mixing_error(const Batch& rounded, const Batch& exact) {
  const auto squares = [](const View& v) {
    double sum = 0;
    for (int64_t i = 0; i < v.elements(); ++i) sum += double(v.as<float>()[i]) * double(v.as<float>()[i]);
    return sum;
  };
  double error = 0, size = 0;
  for (int64_t t = 0; t < exact.d.tokens; ++t) {
    const View found = rounded.grads.weights.at(t), wanted = exact.grads.weights.at(t);
    for (int64_t r = 0; r < exact.d.top_k; ++r) {
      const double off = double(found.as<float>()[r]) - double(wanted.as<float>()[r]);
      error += off * off;
      size += squares(exact.dout.y.at(t)) * squares(exact.out.y.at(t));
    }
  }
  return std::sqrt(error / size);
}

// Rows padded to the product's unit, operands rounded: within bf16's error of float32, in the memory that is stated.
TEST(Experts, Bf16Products) {
  if (!cpu_has_bf16_products()) GTEST_SKIP() << "this CPU has no bf16 products";
  for (const Dims& d : {Dims{300, 5, 2, 32, 48, kSitu}, Dims{3, 4, 2, 32, 48, kSitu}}) {
    for (Routing routing : {Routing::crowded, Routing::half_used}) {
      Batch exact(d, routing), rounded(d, routing, Product::bf16);
      exact.run();
      const int64_t base = rounded.arena.used();
      rounded.arena.reset_peak();
      rounded.run();
      int64_t stated = 0;
      for (const auto& [key, entry] : rounded.ledger.entries()) stated = std::max(stated, entry.costs.workspace_bytes);
      EXPECT_EQ(rounded.arena.peak() - base, stated);
      EXPECT_LT(difference(rounded.out.y, exact.out.y), 1e-2);
      EXPECT_LT(difference(rounded.grads.x, exact.grads.x), 1e-2);
      EXPECT_LT(mixing_error(rounded, exact), 4e-3);
      EXPECT_LT(difference(rounded.grads.w1, exact.grads.w1), 1e-2);
      EXPECT_LT(difference(rounded.grads.w2, exact.grads.w2), 1e-2);
      EXPECT_GT(difference(rounded.out.y, exact.out.y), 1e-5) << "the products were not rounded";
    }
  }
}

TEST(Experts, StridedTokens) {
  const Dims d{33, 4, 2, 8, 6, kSitu};
  Batch b(d, Routing::spread);
  b.run();
  const Shape wide{d.tokens, 20};
  const View x = b.arena.allocate(DType::f32, wide).column_range(4, 8),
             y = b.arena.allocate(DType::f32, wide).column_range(4, 8);
  const View dy = b.arena.allocate(DType::f32, wide).column_range(4, 8),
             dx = b.arena.allocate(DType::f32, wide).column_range(4, 8);
  for (int64_t t = 0; t < d.tokens; ++t) {
    std::copy_n(b.in.x.as<float>() + t * 8, 8, x.as<float>() + t * 20);
    std::copy_n(b.dout.y.as<float>() + t * 8, 8, dy.as<float>() + t * 20);
  }
  Inputs in = b.in;
  in.x = x;
  Grads grads = b.grads;
  grads.x = dx;
  forward(b.ctx, d, in, {y}, &b.saved);
  backward(b.ctx, d, in, b.saved, {dy}, grads);
  for (int64_t t = 0; t < d.tokens; ++t) {
    EXPECT_EQ(std::memcmp(b.out.y.as<float>() + t * 8, y.as<float>() + t * 20, 8 * sizeof(float)), 0) << t;
    EXPECT_EQ(std::memcmp(b.grads.x.as<float>() + t * 8, dx.as<float>() + t * 20, 8 * sizeof(float)), 0) << t;
  }
}

TEST(Experts, CountsTheProducts) {
  const Dims d{10, 4, 3, 8, 6, kSitu};
  EXPECT_EQ(costs(d, DType::f32, Pass::forward, Product::f32).gemm_flops, 6 * 10 * 3 * 8 * 6);
  EXPECT_EQ(costs(d, DType::f32, Pass::backward, Product::f32).gemm_flops, 12 * 10 * 3 * 8 * 6);
}

TEST(Experts, PartialsSufficeForEverySplit) {
  // Rows spread over experts in every way of three parts: never more further segments than buffers.
  for (int64_t rows : {1, 1024, 1025, 5000, 8192, 20000}) {
    const Dims d{rows, 3, 1, 1, 1, kSitu};
    for (int64_t a = 0; a <= rows; a += 511) {
      for (int64_t b = 0; a + b <= rows; b += 1023) {
        int64_t further = 0;
        for (int64_t r : {a, b, rows - a - b}) further += std::max<int64_t>(r - 1, 0) / segment_rows(d);
        EXPECT_LE(further, max_partials(d)) << rows << " " << a << " " << b;
      }
    }
  }
}

TEST(Experts, RefusesAnExpertThatDoesNotExist) {
  Batch b({2, 3, 1, 4, 4, kSitu}, Routing::spread);
  b.in.indices.as<int32_t>()[1] = 3;
  EXPECT_THROW(forward(b.ctx, b.d, b.in, b.out, nullptr), Error);
}

}  // namespace
}  // namespace tessera::ops::experts
