#pragma once

#include "ops/check/check.h"
#include "ops/router/balance.h"

namespace tessera::ops::router {

const check::OpTable& table();

namespace z_loss {
const check::OpTable& table();
}

// Routes, counts and balances one batch with a quantile method.
check::Case count_case(Dims, BalanceOptions);

// Logits whose biased scores s + b of a row are at least 0.4 / E apart: no rounding and no finite difference flips a
// selection. For |b| <= 0.05 and sigmoid scores.
std::vector<double> separated_logits(int64_t tokens, const std::vector<double>& bias, uint64_t seed);

}  // namespace tessera::ops::router
