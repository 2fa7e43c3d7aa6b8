// Choosing the next token from logits: greedy, temperature, top-p. A draw is a pure function of (seed, position).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/philox.h"

namespace tessera::infer {

struct SamplingOptions {
  double temperature = 1;  // 0: greedy, ties to the lower id
  double top_p = 1;        // smallest set of likeliest tokens whose probabilities reach this sum
  uint64_t seed = 1;
};

class Sampler {
 public:
  explicit Sampler(SamplingOptions options) : options_(options), random_(options.seed, Purpose::sampling) {}

  // `position`: index of the token being drawn in its sequence. `allowed`: ids from here on are never drawn.
  int32_t draw(std::span<const float> logits, int64_t position, int64_t allowed);

 private:
  SamplingOptions options_;
  Philox random_;
  std::vector<std::pair<double, int32_t>> ranked_;  // probability, id; kept to avoid allocation a token
};

}  // namespace tessera::infer
