#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace tessera::optim {
namespace {

double decayed(DecayForm form, double t) {
  switch (form) {
    case DecayForm::cosine: return (1 + std::cos(std::numbers::pi * t)) / 2;
    case DecayForm::linear: return 1 - t;
    case DecayForm::one_minus_sqrt: return 1 - std::sqrt(t);
  }
  return 1;
}

}  // namespace

int64_t Schedule::decay_begin() const {
  switch (shape) {
    case Shape::constant: return total_steps;
    case Shape::cosine: return warmup_steps;
    case Shape::wsd: return total_steps - std::llround(decay_fraction * static_cast<double>(total_steps));
  }
  return total_steps;
}

double Schedule::at(int64_t step) const {
  if (step < warmup_steps) return peak * (static_cast<double>(step + 1) / static_cast<double>(warmup_steps));
  const int64_t begin = decay_begin();
  if (shape == Shape::constant || step < begin) return peak;
  const double floor = peak * floor_ratio;
  if (step >= total_steps) return floor;
  const double t = static_cast<double>(step - begin) / static_cast<double>(total_steps - begin);
  return floor + (peak - floor) * decayed(shape == Shape::cosine ? DecayForm::cosine : decay_form, t);
}

void Schedule::validate() const {
  if (!(peak >= 0) || !std::isfinite(peak)) {
    fail_user("learning rate peak is {}; wanted a finite number >= 0; typical is 1e-4 to 1e-2", peak);
  }
  if (!(floor_ratio >= 0 && floor_ratio <= 1)) {
    fail_user("learning rate floor ratio is {}; wanted 0 to 1; give the end value divided by the peak", floor_ratio);
  }
  if (warmup_steps < 0 || total_steps < 0 || warmup_steps > total_steps) {
    fail_user("warm-up of {} steps in a run of {}; wanted 0 <= warm-up <= total; lower optim.warmup_steps",
              warmup_steps, total_steps);
  }
  if (shape != Shape::wsd) return;
  if (!(decay_fraction >= 0 && decay_fraction <= 1)) {
    fail_user("decay fraction is {}; wanted 0 to 1; typical is 0.1 to 0.35", decay_fraction);
  }
  if (decay_begin() < warmup_steps) {
    fail_user(
        "the decay begins at step {} of {}, inside the warm-up of {} steps; lower optim.warmup_steps or "
        "optim.decay_fraction, or take more steps",
        decay_begin(), total_steps, warmup_steps);
  }
}

}  // namespace tessera::optim
