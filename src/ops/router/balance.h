// Load balancing without an auxiliary loss: how the router's bias b moves, once a step, from counts of that step.
//
// Quantile balancing: b_j is the value at which expert j would be chosen by exactly q = m k / E of the step's m tokens,
// read off a histogram of the margins r_ij = cutoff_i - s_ij. Histograms are integers, so the result does not depend on
// micro-batches or sharding. Bins are uniform in r (the published method) or, by default, uniform in
// asinh((r - b_j) / h): finest where the quantile sits once balanced, which keeps saturated scores balanced too.
// Source: moe.md 2.2 - 2.4 and 2.8. The batch is always routed with the old b.
#pragma once

#include "ops/router/op.h"

namespace tessera::ops::router {

enum class Balance : uint8_t { quantile_centred, quantile_uniform, sign, none };

struct BalanceOptions {
  Balance method = Balance::quantile_centred;
  int64_t bins = 512;       // B; 1000 for the published uniform method
  double width = 1e-4;      // h of the centred bins
  double smoothing = 0;     // rho: b <- rho b + (1 - rho) bhat
  double sign_step = 1e-3;  // gamma of the sign rule
  double min_tokens = 8;    // below q = m k / E of this many tokens keep counting instead of moving

  bool operator==(const BalanceOptions&) const = default;
};

inline bool counts_quantiles(Balance method) {
  return method == Balance::quantile_centred || method == Balance::quantile_uniform;
}

// Counters of one layer: of the running step, and of the steps before it that had too few tokens to move the bias.
struct Counters {
  View load;     // (E) i64: tokens routed to each expert
  View weight;   // (E) f64: sum of p: the expert's share of the output
  View by_bias;  // (E) i64: selections that the bias alone made (not in the top k of s)
  View tokens;   // (1) i64: m, valid rows counted
  View invalid;  // (1) i64: rows with a non-finite logit (Outputs::invalid of the step); above 0 it is no good step
  View output_squares;  // (E) f64: sum of |y_j|^2, the experts' outputs before weighting; absent: not wanted
  View histogram;       // (E, B) i32, earlier steps included; absent for the sign rule and none
  View pending_load;    // (E) i64: of the earlier steps alone
  View pending_tokens;  // (1) i64
  View room;            // memory that the histogram lies in
};

struct CountersWanted {
  bool output_squares = false;
  int64_t most_bins = 0;  // room for a histogram of so many bins, should restart() ask for them
};

Counters allocate_counters(Arena&, int64_t experts, const BalanceOptions&, const CountersWanted& = {});
void clear(const Counters&);
// Counts with other options from now on, from zero. The histogram must fit into its room.
void restart(Counters&, const BalanceOptions&);

// Adds one micro-batch: rows without a non-finite logit. Only in training, only in the first forward (never in
// recomputation).
void count(Context&, const Dims&, const Inputs&, const Outputs&, const BalanceOptions&, const Counters&);

struct BalanceReport {
  bool moved = false;           // false: too few tokens, or k == E
  double max_vio = 0;           // max_j load_j / q - 1
  double min_load = 0;          // min_j load_j / q
  double floor = 0;             // sqrt(2 ln E / q): the MaxVio of a perfect bias on a fresh batch
  double spread = 0;            // max b - min b
  double step = 0;              // ||b_new - b_old||_inf
  double largest_bin_mass = 0;  // share of tokens in the fullest quantile bin; above 0.05 the bins are too coarse
  int64_t dead = 0;             // experts without a token
};

// End of a step: new bias from the counters, mean-centred, in float64 and a fixed order. Clears the counters; with too
// few tokens to move, what the next step needs stays as pending.
BalanceReport balance(const Dims&, const BalanceOptions&, const View& bias, const Counters&);

}  // namespace tessera::ops::router
