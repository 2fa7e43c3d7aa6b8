#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"

namespace tessera::optim {
namespace {

TEST(Schedule, WarmupIsLinearAndEndsAtThePeak) {
  for (Shape shape : {Shape::constant, Shape::cosine, Shape::wsd}) {
    const Schedule s{.peak = 0.5, .floor_ratio = 0.1, .warmup_steps = 4, .total_steps = 100, .shape = shape};
    EXPECT_EQ(s.at(0), 0.125);
    EXPECT_EQ(s.at(1), 0.25);
    EXPECT_EQ(s.at(2), 0.375);
    EXPECT_EQ(s.at(3), 0.5);
    EXPECT_EQ(s.at(4), 0.5);
  }
}

TEST(Schedule, ConstantStays) {
  const Schedule s{.peak = 3e-4, .floor_ratio = 0.1, .total_steps = 10};
  for (int64_t step : {0, 5, 9, 10, 1000}) EXPECT_EQ(s.at(step), 3e-4);
}

TEST(Schedule, CosineGoldenValues) {
  const Schedule s{.peak = 1, .floor_ratio = 0.2, .warmup_steps = 20, .total_steps = 100, .shape = Shape::cosine};
  EXPECT_EQ(s.at(20), 1);
  EXPECT_NEAR(s.at(40), 0.2 + 0.8 * 0.8535533905932737, 1e-15);  // t = 1/4: (1 + sqrt(1/2)) / 2
  EXPECT_NEAR(s.at(60), 0.6, 1e-15);
  EXPECT_NEAR(s.at(80), 0.2 + 0.8 * 0.14644660940672624, 1e-15);
  EXPECT_EQ(s.at(100), 0.2);
  EXPECT_EQ(s.at(1 << 30), 0.2);
}

TEST(Schedule, WsdGoldenValues) {
  Schedule s{.peak = 2, .floor_ratio = 0.25, .warmup_steps = 10, .total_steps = 1000, .shape = Shape::wsd};
  s.decay_fraction = 0.16;
  EXPECT_EQ(s.decay_begin(), 840);
  for (DecayForm form : {DecayForm::cosine, DecayForm::linear, DecayForm::one_minus_sqrt}) {
    s.decay_form = form;
    EXPECT_EQ(s.at(10), 2);
    EXPECT_EQ(s.at(840), 2);
    EXPECT_LT(s.at(841), 2);
    EXPECT_EQ(s.at(1000), 0.5);
  }
  s.decay_form = DecayForm::linear;
  EXPECT_NEAR(s.at(880), 0.5 + 1.5 * 0.75, 1e-15);
  s.decay_form = DecayForm::one_minus_sqrt;
  EXPECT_NEAR(s.at(880), 0.5 + 1.5 * 0.5, 1e-15);
  s.decay_form = DecayForm::cosine;
  EXPECT_NEAR(s.at(920), 0.5 + 1.5 * 0.5, 1e-15);
}

TEST(Schedule, NeverJumpsAndNeverRisesAfterTheWarmup) {
  for (Shape shape : {Shape::cosine, Shape::wsd}) {
    for (DecayForm form : {DecayForm::cosine, DecayForm::linear}) {
      const Schedule s{1, 0.1, 50, 2000, shape, 0.35, form};
      for (int64_t step = 1; step < 2100; ++step) {
        const double change = s.at(step) - s.at(step - 1);
        ASSERT_LE(std::abs(change), step < 50 ? 0.02 + 1e-12 : 0.003) << step;
        if (step >= 50) {
          ASSERT_LE(change, 0) << step;
        }
      }
    }
  }
}

TEST(Schedule, JoinedStagesMeetAtOneFifth) {
  // context-pipeline.md 1.2: a stage that falls to 1/5 over its last fifth ends where the next begins.
  const Schedule stage{7e-4, 0.2, 0, 500, Shape::wsd, 0.2, DecayForm::cosine};
  const double next_peak = 7e-4 / 5;
  EXPECT_NEAR(stage.at(500), next_peak, std::nextafter(next_peak, 1) - next_peak);
}

TEST(Schedule, EmptyRunsAndRunsOfWarmupAlone) {
  const Schedule empty{.peak = 1, .floor_ratio = 0.5, .shape = Shape::cosine};
  EXPECT_EQ(empty.at(0), 0.5);
  const Schedule warm{.peak = 1, .floor_ratio = 0.5, .warmup_steps = 8, .total_steps = 8, .shape = Shape::cosine};
  EXPECT_EQ(warm.at(7), 1);
  EXPECT_EQ(warm.at(8), 0.5);
}

TEST(Schedule, RefusesWhatMakesNoSchedule) {
  const Schedule good{1e-3, 0.1, 100, 1000, Shape::wsd, 0.2, DecayForm::linear};
  EXPECT_NO_THROW(good.validate());
  for (auto change : {+[](Schedule& s) { s.peak = -1; }, +[](Schedule& s) { s.peak = std::nan(""); },
                      +[](Schedule& s) { s.floor_ratio = 1.5; }, +[](Schedule& s) { s.warmup_steps = 1001; },
                      +[](Schedule& s) { s.decay_fraction = -0.1; }, +[](Schedule& s) { s.decay_fraction = 0.95; }}) {
    Schedule bad = good;
    change(bad);
    EXPECT_THROW(bad.validate(), UserError);
  }
}

}  // namespace
}  // namespace tessera::optim
