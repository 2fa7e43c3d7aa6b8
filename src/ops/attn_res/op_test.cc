// The table, and the oracles A1, A2, A3 and A7 of moe.md 5.8; A5, finite differences, is the table's.
#include "ops/attn_res/op.h"

#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "core/philox.h"
#include "ops/attn_res/cases.h"
#include "ops/check/gtest_table.h"

namespace tessera::ops::attn_res {
namespace {

TESSERA_OP_TABLE_TESTS(AttnRes, table())

struct Mix {
  Dims d;
  Arena arena{1 << 24};
  Context ctx{Device::cpu, arena};
  Inputs in;
  Outputs out;
  Saved saved;
  OutputGrads dout;
  Grads grads;

  Mix(const Dims& dims, double query_scale) : d(dims) {
    arena.set_poison(true);
    for (int64_t s = 0; s < d.sources; ++s) in.sources.push_back(normal({d.tokens, d.width}, 10 + uint64_t(s)));
    in.query = normal({d.width}, 1, query_scale);
    in.gain = normal({d.width}, 2);
    out.h = arena.allocate(DType::f64, {d.tokens, d.width});
    saved = allocate_saved(ctx, d, DType::f64);
    dout.h = normal({d.tokens, d.width}, 3);
    for (int64_t s = 0; s < d.sources; ++s) {
      grads.sources.push_back(arena.allocate_zeroed(DType::f64, {d.tokens, d.width}));
    }
    grads.query = arena.allocate_zeroed(DType::f64, {d.width});
    grads.gain = arena.allocate_zeroed(DType::f64, {d.width});
  }

  View normal(Shape shape, uint64_t seed, double scale = 1.0) {
    const View v = arena.allocate(DType::f64, shape);
    const Philox philox(seed, Purpose::test);
    for (int64_t i = 0; i < v.elements(); ++i) v.as<double>()[i] = scale * philox.normal(static_cast<uint64_t>(i));
    return v;
  }
  void run() {
    forward(ctx, d, in, out, &saved);
    backward(ctx, d, in, out, saved, dout, grads);
  }
};

TEST(AttnRes, QueryOfZeroIsTheMeanOfTheSources) {  // A1, A7
  Mix m({13, 40, 5, 1e-5}, 0.0);
  m.run();
  double dquery = 0;
  for (int64_t i = 0; i < m.out.h.elements(); ++i) {
    double sum = 0;
    for (const View& v : m.in.sources) sum += v.as<double>()[i];
    EXPECT_NEAR(m.out.h.as<double>()[i], sum / 5, 1e-14);
    for (const View& dv : m.grads.sources) EXPECT_NEAR(dv.as<double>()[i], m.dout.h.as<double>()[i] / 5, 1e-14);
  }
  for (int64_t i = 0; i < m.d.width; ++i) {
    EXPECT_EQ(m.grads.gain.as<double>()[i], 0.0);
    dquery += std::fabs(m.grads.query.as<double>()[i]);
  }
  EXPECT_GT(dquery, 0.1) << "the query must be able to leave zero";
}

TEST(AttnRes, OneSourcePassesThrough) {  // A2
  Mix m({13, 40, 1, 1e-5}, 0.7);
  m.run();
  for (int64_t i = 0; i < m.out.h.elements(); ++i) {
    EXPECT_EQ(m.out.h.as<double>()[i], m.in.sources[0].as<double>()[i]);
    EXPECT_EQ(m.grads.sources[0].as<double>()[i], m.dout.h.as<double>()[i]);
  }
  for (int64_t i = 0; i < m.d.width; ++i) {
    EXPECT_EQ(m.grads.query.as<double>()[i], 0.0);
    EXPECT_EQ(m.grads.gain.as<double>()[i], 0.0);
  }
}

TEST(AttnRes, ScoresDoNotDependOnTheScaleOfASource) {  // A3
  Mix m({13, 40, 3, 1e-12}, 0.5), scaled({13, 40, 3, 1e-12}, 0.5);
  for (int64_t i = 0; i < m.out.h.elements(); ++i) scaled.in.sources[1].as<double>()[i] *= 37.0;
  m.run();
  scaled.run();
  for (int64_t i = 0; i < m.saved.score.elements(); ++i) {
    EXPECT_NEAR(m.saved.score.as<double>()[i], scaled.saved.score.as<double>()[i], 1e-9);
  }
}

TEST(AttnRes, GradientsAddToWhatIsThere) {
  Mix m({6, 8, 2, 1e-5}, 0.5), twice({6, 8, 2, 1e-5}, 0.5);
  m.run();
  twice.run();
  backward(twice.ctx, twice.d, twice.in, twice.out, twice.saved, twice.dout, twice.grads);
  const auto expect_double = [](const View& one, const View& two) {
    for (int64_t i = 0; i < one.elements(); ++i) EXPECT_NEAR(two.as<double>()[i], 2 * one.as<double>()[i], 1e-12);
  };
  for (size_t s = 0; s < 2; ++s) expect_double(m.grads.sources[s], twice.grads.sources[s]);
  expect_double(m.grads.query, twice.grads.query);
  expect_double(m.grads.gain, twice.grads.gain);
}

TEST(AttnRes, GradientsAreTheSameForAnyNumberOfThreads) {
  const int before = thread_count();
  const Dims d{701, 40, 3, 1e-5};  // several ranges of tokens, uneven
  Mix one(d, 0.5), many(d, 0.5);
  set_thread_count(1);
  one.run();
  set_thread_count(5);
  many.run();
  set_thread_count(before);
  for (int64_t i = 0; i < d.width; ++i) {
    EXPECT_EQ(one.grads.query.as<double>()[i], many.grads.query.as<double>()[i]);
    EXPECT_EQ(one.grads.gain.as<double>()[i], many.grads.gain.as<double>()[i]);
  }
}

TEST(AttnRes, ANonFiniteSourceShowsInItsTokenOnly) {
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Mix m({4, 8, 3, 1e-5}, 0.5);
    m.in.sources[2].as<double>()[2 * 8 + 5] = bad;
    forward(m.ctx, m.d, m.in, m.out, nullptr);
    for (int64_t i = 0; i < m.out.h.elements(); ++i) EXPECT_EQ(std::isfinite(m.out.h.as<double>()[i]), i / 8 != 2);
  }
}

}  // namespace
}  // namespace tessera::ops::attn_res
