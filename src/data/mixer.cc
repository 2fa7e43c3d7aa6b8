#include "data/mixer.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace tessera::data {

Mixer::Mixer(std::vector<double> weights, int64_t context)
    : weights_(std::move(weights)), given_(weights_.size(), 0), context_(context) {
  for (const double weight : weights_) TESSERA_CHECK(std::isfinite(weight) && weight >= 0, "source weight {}", weight);
  scale();
}

void Mixer::scale() {
  double sum = 0;
  for (const double weight : weights_) sum += weight;
  if (sum == 0) return;
  for (double& weight : weights_) weight /= sum;
}

int Mixer::choose() const {
  int best = -1;
  double best_need = 0;
  for (size_t s = 0; s < weights_.size(); ++s) {
    if (weights_[s] == 0) continue;
    const double need = weights_[s] * static_cast<double>(total_ + context_) - static_cast<double>(given_[s]);
    if (best < 0 || need > best_need) {
      best = static_cast<int>(s);
      best_need = need;
    }
  }
  return best;
}

void Mixer::give(int source, int64_t tokens) {
  given_[static_cast<size_t>(source)] += tokens;
  total_ += tokens;
}

void Mixer::drop(int source) {
  weights_[static_cast<size_t>(source)] = 0;
  scale();
  std::fill(given_.begin(), given_.end(), 0);
  total_ = 0;
}

}  // namespace tessera::data
