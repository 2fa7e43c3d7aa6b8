// Time that this process has waited for others, since it was made.
#pragma once

#include <algorithm>
#include <chrono>

namespace tessera::dist {

class Waited {
 public:
  // Asked again and again. Steps longer than a second count as one: then this process was stopped itself, perhaps the
  // whole job with it.
  double seconds() {
    const auto now = Clock::now();
    sum_ += std::min(std::chrono::duration<double>(now - last_).count(), 1.0);
    last_ = now;
    return sum_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
  double sum_ = 0;
};

}  // namespace tessera::dist
