// What the collapse guard judges by: the sums of a window, and the signals made of them (moe.md 6). Host vectors, one
// value an expert.
#pragma once

#include <vector>

#include "core/view.h"

namespace tessera::train {

struct ExpertSums {     // of one expert over the running window
  double load = 0;      // tokens
  double weight = 0;    // mixing weights
  double by_bias = 0;   // selections that the bias alone made
  double gradient = 0;  // squares of the weight gradients of each step
  double output = 0;    // squares of the outputs before weighting
};

struct Signals {
  std::vector<double> u;      // load over the mean
  std::vector<double> omega;  // share of the mixing weight, 1 on average
  std::vector<double> rho;    // share of its tokens that only the bias sends
  std::vector<double> gn;     // RMS of the weight gradient over the layer's median
  std::vector<double> on;     // RMS of the output over its tokens, over the median of experts with tokens
  double entropy = 1;         // of the load, over ln E
};

Signals signals_of(const std::vector<ExpertSums>& window);

// Largest cosine of each router row with another row, (E, D) f32: 1 for a twin. E^2 D products, so for audits only.
std::vector<double> router_cosines(const View& rows);

}  // namespace tessera::train
