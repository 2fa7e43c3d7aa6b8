// Learning-rate schedules: pure functions of the step, so that a resumed run computes the rate and never reads it back.
//
// Every shape begins with the same linear warm-up, peak (s + 1) / warmup_steps for s < warmup_steps, which ends at the
// peak. With t the fraction done of the falling part and floor = floor_ratio peak:
//   constant  peak
//   cosine    floor + (peak - floor) (1 + cos(pi t)) / 2 from the end of the warm-up to total_steps
//   wsd       peak, then floor + (peak - floor) f(t) over the last decay_fraction of total_steps
// From total_steps on the rate stays at the end value. Source: moe.md 7.6. The `join` between two context stages and
// the final anneal (context-pipeline.md 1.2) are wsd: (0.2, cosine, floor 1/5) and (0.02, linear, floor 1/10).
#pragma once

#include <cstdint>

namespace tessera::optim {

enum class Shape : uint8_t { constant, cosine, wsd };
enum class DecayForm : uint8_t { cosine, linear, one_minus_sqrt };  // f(t): (1 + cos(pi t)) / 2, 1 - t, 1 - sqrt(t)

struct Schedule {
  double peak = 0;
  double floor_ratio = 0;  // end value / peak; constant ignores it
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  Shape shape = Shape::constant;
  double decay_fraction = 0.2;  // wsd only
  DecayForm decay_form = DecayForm::one_minus_sqrt;

  double at(int64_t step) const;  // 0-based: the rate of the step that follows `step` finished ones
  int64_t decay_begin() const;    // first step of the falling part; total_steps when nothing falls
  void validate() const;          // UserError on values that make no schedule
};

}  // namespace tessera::optim
