#include <gtest/gtest.h>

#include "optim/test_slots.h"

namespace tessera::optim {
namespace {

// The formulas of AdamW as published, bias-corrected moments spelled out.
void reference_step(const Options& o, double rate, double decay, int64_t t, const Values& g, Values& m, Values& v,
                    Values& w) {
  for (size_t i = 0; i < g.size(); ++i) {
    m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
    v[i] = o.beta2 * v[i] + (1 - o.beta2) * g[i] * g[i];
    const double m_hat = m[i] / (1 - std::pow(o.beta1, double(t))), v_hat = v[i] / (1 - std::pow(o.beta2, double(t)));
    w[i] = w[i] - rate * (m_hat / (std::sqrt(v_hat) + o.epsilon) + decay * w[i]);
  }
}

double worst_error(DType dtype, const tessera::Shape& shape, const Options& options, double decay) {
  Bench bench(dtype);
  const Slot slot = bench.slot("w", shape, Rule::adamw, 1, decay, 21);
  Optimizer optimizer({slot}, options);
  optimizer.allocate_state(bench.context);
  Values w = read(slot.value), m(w.size(), 0.0), v(w.size(), 0.0);
  for (int64_t step = 0; step < 6; ++step) {
    bench.fill(slot.gradient, random_values(200 + uint64_t(step), shape.elements(), step == 3 ? 1e-6 : 0.1));
    reference_step(options, 0.01, decay, step + 1, read(slot.gradient), m, v, w);
    optimizer.step(bench.context, 0.01, step);
  }
  return std::max({relative_error(read(slot.value), w), relative_error(read(optimizer.state()[0].view), m),
                   relative_error(read(optimizer.state()[1].view), v)});
}

TEST(AdamW, EqualsReferenceOverSeveralSteps) {
  for (const tessera::Shape& shape :
       {tessera::Shape{1}, tessera::Shape{17}, tessera::Shape{3, 5}, tessera::Shape{70001}, tessera::Shape{2, 4, 9}}) {
    SCOPED_TRACE(shape.to_string());
    for (const Options& options : {Options{.clip_norm = 0}, Options{.beta1 = 0.8, .beta2 = 0.999, .clip_norm = 0},
                                   Options{.beta1 = 0, .beta2 = 0, .epsilon = 1e-3, .clip_norm = 0}}) {
      EXPECT_LT(worst_error(DType::f64, shape, options, 0.1), 1e-13);
      EXPECT_LT(worst_error(DType::f32, shape, options, 0.1), 1e-6);
    }
  }
}

TEST(AdamW, FirstStepMovesByTheRate) {
  Bench bench(DType::f64);
  const Slot slot = bench.slot("w", {8}, Rule::adamw, 1, 0, 23);
  const Values before = read(slot.value);
  Optimizer optimizer({slot}, {.epsilon = 1e-30});
  optimizer.allocate_state(bench.context);
  optimizer.step(bench.context, 0.25, 0);
  for (size_t i = 0; i < 8; ++i) {
    const double g = slot.gradient.as<double>()[i];
    EXPECT_NEAR(slot.value.as<double>()[i] - before[i], g > 0 ? -0.25 : 0.25, 1e-14);
  }
}

TEST(AdamW, DecayIsDecoupled) {
  // Without gradient the moments stay zero and the value shrinks by exactly 1 - rate * decay.
  Bench bench;
  const Slot slot = bench.slot("w", {100}, Rule::adamw, 1, 0.5, 25, 0.0);
  const Values before = read(slot.value);
  Optimizer optimizer({slot}, {});
  optimizer.allocate_state(bench.context);
  optimizer.step(bench.context, 0.125, 0);
  for (size_t i = 0; i < 100; ++i) EXPECT_EQ(slot.value.as<float>()[i], float(before[i]) * 0.9375f);
  for (const auto& tensor : optimizer.state()) EXPECT_EQ(read(tensor.view), Values(100, 0.0));
}

}  // namespace
}  // namespace tessera::optim
