// Gates, betas and keys at their ends, and relations between runs that hold to rounding.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/kda/problem.h"

namespace tessera::ops::kda {
namespace {

using reference::Values;

struct Compared {
  Result want, f64, f32;
};
Compared compare(const Problem& p, const reference::Inputs& in) {
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  return {run_reference(p, in, d_o, d_final), run_values(p, in, DType::f64, d_o, d_final),
          run_values(p, in, DType::f32, d_o, d_final)};
}
void expect_close(const Problem& p, const reference::Inputs& in, double limit_f64 = 1e-12, double limit_f32 = 1e-4) {
  const Compared c = compare(p, in);
  EXPECT_LE(difference(c.f64, c.want), limit_f64) << p.name();
  EXPECT_LE(difference(c.f32, c.want), limit_f32) << p.name();
}

bool all_finite(const Result& r) {
  for (const Values* values : {&r.out.o, &r.out.final_state, &r.grads.q, &r.grads.k, &r.grads.v, &r.grads.z,
                               &r.grads.beta_logit, &r.grads.a_log, &r.grads.dt_bias, &r.grads.initial_state}) {
    for (const double x : *values) {
      if (!std::isfinite(x)) return false;
    }
  }
  return true;
}

constexpr double kSaturated = 1e4;  // as x: the bounded gate is exactly its bound, or 0 with the other sign

TEST(KdaExtremes, GatesAtTheBoundAndAtZero) {
  for (const int64_t chunk : {16, 64}) {
    for (const double shift : {kSaturated, -kSaturated}) {
      Problem p = make_problem({130}, 2, 32, 32, chunk);
      p.z_shift = shift;
      expect_close(p, p.values());
    }
  }
}

TEST(KdaExtremes, AlternatingChannelsAndOneSteepToken) {
  const Problem p = make_problem({130}, 2, 32, 32, 64);
  reference::Inputs in = p.values();
  for (size_t i = 0; i < in.z.size(); ++i) in.z[i] = i % 2 == 0 ? kSaturated : -kSaturated;
  expect_close(p, in);
  const size_t width = in.z.size() / 130;
  for (size_t i = 0; i < in.z.size(); ++i) in.z[i] = i / width == 40 ? kSaturated : -kSaturated;
  expect_close(p, in);
}

TEST(KdaExtremes, SteepUnboundedGateForgetsExactly) {
  const Problem p = make_problem({130}, 2, 32, 32, 64, Gate::unbounded);
  reference::Inputs in = p.values();
  const size_t width = in.z.size() / 130;
  for (size_t i = 0; i < width; ++i) in.z[40 * width + i] = 1000 * 10;  // g of -1000 and below at token 40
  expect_close(p, in);
  reference::Inputs other = in;  // another past
  for (size_t i = 0; i < in.v.size() / 130 * 40; ++i) other.v[i] += 3;
  const Values d_o = output_gradient(p);
  const Result a = run_values(p, in, DType::f32, d_o, {}), b = run_values(p, other, DType::f32, d_o, {});
  EXPECT_EQ(token_rows(p, a.out.o, 40, 130), token_rows(p, b.out.o, 40, 130));
  EXPECT_EQ(a.out.final_state, b.out.final_state);
  for (const double x : a.grads.initial_state) EXPECT_TRUE(std::isfinite(x));
}

TEST(KdaExtremes, EveryGateSteep) {
  Problem p = make_problem({70}, 2, 32, 32, 64, Gate::unbounded);
  p.z_shift = kSaturated;
  expect_close(p, p.values());
}

TEST(KdaExtremes, RatesAreFinite) {
  for (const Gate gate : {Gate::bounded, Gate::unbounded}) {
    for (const double a_log : {-80.0, 80.0, 100.0}) {
      for (const double shift : {-kSaturated, -3.0, 0.0, kSaturated}) {
        Problem p = make_problem({40}, 1, 16, 16, 64, gate);
        p.a_log = a_log;
        p.z_shift = shift;
        const Result r = run_values(p, p.values(), DType::f32, output_gradient(p), state_gradient(p));
        EXPECT_TRUE(all_finite(r)) << p.name();
      }
    }
  }
}

TEST(KdaExtremes, BetaZero) {
  // One token, then a tile, then the whole document: the state only decays, r = 0, dv = 0, dbeta does not vanish.
  const int64_t tokens = 80;
  for (const auto& [begin, end] : {std::pair{5, 6}, std::pair{16, 32}, std::pair{0, 80}}) {
    const Problem p = make_problem({tokens}, 2, 16, 16, 64);
    reference::Inputs in = p.values();
    for (int64_t i = begin * 2; i < end * 2; ++i) in.beta_logit[size_t(i)] = -1e4;  // sigmoid underflows to 0
    expect_close(p, in);
    const Result r = run_values(p, in, DType::f32, output_gradient(p), {});
    for (const double x : token_rows(p, r.grads.v, begin, end)) EXPECT_EQ(x, 0.0);
  }
  Problem weak = make_problem({tokens}, 1, 16, 16, 64);  // almost 0: the gradient of beta without division by beta
  weak.beta_shift = -60;
  expect_close(weak, weak.values());
}

// Every key the same unit vector.
void same_keys(const Problem& p, reference::Inputs& in) {
  for (size_t i = 0; i < in.k.size(); ++i) {
    in.k[i] = i % size_t(p.dims.key_dim) < 4 ? 0.5 : 0.0;
  }
}

TEST(KdaExtremes, BetaOneReplacesTheOldValue) {
  const Problem p = make_problem({70}, 1, 16, 16, 64);
  reference::Inputs in = p.values();
  same_keys(p, in);
  for (double& x : in.beta_logit) x = 1e4;
  for (double& x : in.z) x = -kSaturated;
  in.q = in.k;
  expect_close(p, in);
  const Result r = run_values(p, in, DType::f32, output_gradient(p), {});  // S^T k = v after every token
  for (size_t i = 0; i < r.out.o.size(); ++i) EXPECT_NEAR(r.out.o[i] * 4, in.v[i], 1e-5);
}

TEST(KdaExtremes, IdenticalKeys) {
  for (const double beta : {0.5, 0.9, 0.99, 1.0}) {
    for (const double g : {0.0, -0.01, -0.05}) {
      Problem p = make_problem({128}, 1, 16, 16, 64);
      p.has_a_log = false;
      reference::Inputs in = p.values();
      same_keys(p, in);
      for (double& x : in.beta_logit) x = beta == 1 ? 1e4 : std::log(beta / (1 - beta));
      for (double& x : in.dt_bias) x = 0;
      for (double& x : in.z) x = g == 0 ? -kSaturated : -std::log(-5 / g - 1);
      expect_close(p, in);
    }
  }
}

TEST(KdaExtremes, BetaNearTwo) {
  for (const double z : {-kSaturated, -5.0}) {
    Problem p = make_problem({128}, 1, 16, 16, 64);
    p.dims.negative_eigenvalues = true;
    reference::Inputs in = p.values();
    same_keys(p, in);
    for (double& x : in.beta_logit) x = 5.3;  // 1.99
    for (double& x : in.z) x = z;
    expect_close(p, in);
  }
}

TEST(KdaExtremes, ZeroQueriesAndKeys) {
  const Problem p = make_problem({40}, 2, 16, 16, 32);
  reference::Inputs in = p.values();
  for (size_t i = 0; i < in.k.size(); i += 3 * 16) std::fill_n(in.k.begin() + long(i), 16, 0.0);
  for (size_t i = 0; i < in.q.size(); i += 5 * 16) std::fill_n(in.q.begin() + long(i), 16, 0.0);
  expect_close(p, in);
}

TEST(KdaRelations, WithoutDecayItIsTheDeltaRule) {
  const Problem p = make_problem({90}, 1, 8, 8, 64);
  reference::Inputs in = p.values();
  for (double& x : in.z) x = -kSaturated;
  const Result r = run_values(p, in, DType::f64, output_gradient(p), {});
  Values s = in.initial_state;  // (V, K)
  for (size_t t = 0; t < 90; ++t) {
    const double beta = reference::sigmoid(in.beta_logit[t]);
    for (size_t v = 0; v < 8; ++v) {
      double error = in.v[t * 8 + v], out = 0;
      for (size_t c = 0; c < 8; ++c) error -= s[v * 8 + c] * in.k[t * 8 + c];
      for (size_t c = 0; c < 8; ++c) {
        s[v * 8 + c] += beta * error * in.k[t * 8 + c];
        out += s[v * 8 + c] * in.q[t * 8 + c] / std::sqrt(8.0);
      }
      EXPECT_NEAR(r.out.o[t * 8 + v], out, 1e-12);
    }
  }
}

TEST(KdaRelations, SplitWithCarriedStateIsUnsplit) {
  const Problem p = make_problem({150}, 2, 16, 16, 64, Gate::unbounded);
  const reference::Inputs in = p.values();
  const Values d_o = output_gradient(p), d_final = state_gradient(p);
  const Result whole = run_values(p, in, DType::f64, d_o, d_final);
  for (const int64_t at : {1, 64, 77, 149}) {
    const auto part = [&](int64_t begin, int64_t end, Values state) {
      reference::Inputs one = in;
      for (Values* values : {&one.q, &one.k, &one.v, &one.z, &one.beta_logit}) {
        *values = token_rows(p, *values, begin, end);
      }
      one.initial_state = std::move(state);
      one.offsets = {0, end - begin};
      return one;
    };
    const Problem head = make_problem({at}, 2, 16, 16, 64, Gate::unbounded);
    const Problem tail = make_problem({150 - at}, 2, 16, 16, 64, Gate::unbounded);
    const Values d_head = token_rows(p, d_o, 0, at), d_tail = token_rows(p, d_o, at, 150);
    const reference::Inputs first = part(0, at, in.initial_state);
    const Values carried = run_values(head, first, DType::f64, d_head, {}).out.final_state;
    const Result b = run_values(tail, part(at, 150, carried), DType::f64, d_tail, d_final);
    const Result a = run_values(head, first, DType::f64, d_head, b.grads.initial_state);
    Result joined = whole;
    const auto join = [](Values x, const Values& y) {
      x.insert(x.end(), y.begin(), y.end());
      return x;
    };
    joined.out = {join(a.out.o, b.out.o), b.out.final_state};
    joined.grads = {join(a.grads.q, b.grads.q),
                    join(a.grads.k, b.grads.k),
                    join(a.grads.v, b.grads.v),
                    join(a.grads.z, b.grads.z),
                    join(a.grads.beta_logit, b.grads.beta_logit),
                    a.grads.a_log,
                    a.grads.dt_bias,
                    a.grads.initial_state};
    for (size_t i = 0; i < b.grads.a_log.size(); ++i) joined.grads.a_log[i] += b.grads.a_log[i];
    for (size_t i = 0; i < b.grads.dt_bias.size(); ++i) joined.grads.dt_bias[i] += b.grads.dt_bias[i];
    EXPECT_LE(difference(joined, whole), 1e-12) << "split at " << at;
  }
}

TEST(KdaRelations, StatesAreVFirst) {
  // One token, no decay, beta 1, k = e_1, v = e_2: the state gains 1 at row v = 2, column k = 1, and nowhere else.
  const Problem p = make_problem({1}, 1, 16, 16, 16);
  reference::Inputs in = p.values();
  for (Values* values : {&in.q, &in.k, &in.v, &in.initial_state}) std::fill(values->begin(), values->end(), 0.0);
  in.k[1] = in.v[2] = in.q[3] = 1;
  in.z.assign(in.z.size(), -kSaturated);
  in.beta_logit[0] = 1e4;
  in.initial_state[5 * 16 + 3] = 2;  // v = 5 read by q = e_3
  const Result r = run_values(p, in, DType::f32, output_gradient(p), {});
  for (size_t v = 0; v < 16; ++v) {
    EXPECT_FLOAT_EQ(float(r.out.o[v]), v == 5 ? 0.5f : 0.0f);  // 2 / sqrt(16)
    for (size_t c = 0; c < 16; ++c) {
      EXPECT_EQ(r.out.final_state[v * 16 + c], (v == 2 && c == 1) ? 1 : (v == 5 && c == 3) ? 2 : 0);
    }
  }
}

TEST(KdaRelations, ScalingTheValuesScalesTheOutputs) {
  const Problem p = make_problem({100}, 2, 16, 16, 64);
  const reference::Inputs in = p.values();
  reference::Inputs scaled = in;
  for (Values* values : {&scaled.v, &scaled.initial_state}) {
    for (double& x : *values) x *= 4;  // a power of 2: exact
  }
  const Result a = run_values(p, in, DType::f32, output_gradient(p), {});
  const Result b = run_values(p, scaled, DType::f32, output_gradient(p), {});
  for (size_t i = 0; i < a.out.o.size(); ++i) EXPECT_EQ(4 * a.out.o[i], b.out.o[i]);
  for (size_t i = 0; i < a.out.final_state.size(); ++i) EXPECT_EQ(4 * a.out.final_state[i], b.out.final_state[i]);
}

TEST(KdaRelations, GradientOfTheFinalStateOnly) {
  const Problem p = make_problem({70, 0, 1}, 2, 16, 16, 64);
  const reference::Inputs in = p.values();
  const Values zero(output_gradient(p).size()), d_final = state_gradient(p);
  EXPECT_LE(difference(run_values(p, in, DType::f64, zero, d_final), run_reference(p, in, zero, d_final)), 1e-12);
}

TEST(KdaRelations, NoGradientGivesZeros) {
  const Problem p = make_problem({70, 0, 1}, 2, 16, 16, 64);
  const Result r = run_values(p, p.values(), DType::f32, Values(output_gradient(p).size()), {});
  for (const Values* values : {&r.grads.q, &r.grads.k, &r.grads.v, &r.grads.z, &r.grads.beta_logit, &r.grads.a_log,
                               &r.grads.dt_bias, &r.grads.initial_state}) {
    for (const double x : *values) EXPECT_EQ(x, 0.0);
  }
}

TEST(KdaRelations, InitialStateOnly) {
  const Problem p = make_problem({70}, 2, 16, 16, 64);
  reference::Inputs in = p.values();
  in.v.assign(in.v.size(), 0.0);
  expect_close(p, in);
}

}  // namespace
}  // namespace tessera::ops::kda
