#pragma once

#include "ops/check/check.h"
#include "ops/experts/op.h"

namespace tessera::ops::experts {

enum class Routing : uint8_t {
  spread,     // k different experts a token, at random
  crowded,    // every first choice is expert 0; others at random
  half_used,  // odd experts are never chosen, every third slot is empty, token 0 is routed nowhere
  skewed      // low experts are likelier: the first of 128 has four times the mean
};

const check::OpTable& table();
std::vector<double> choose_experts(const Dims&, Routing);  // (T, k)

// x, indices, weights, w1, w3, w2 as the harness gives them.
Inputs inputs_of(const check::Run&);
std::vector<check::Tensor> make_inputs(const Dims&, Routing);

}  // namespace tessera::ops::experts
