#include "infer/sampler.h"

#include <algorithm>
#include <cmath>

namespace tessera::infer {

int32_t Sampler::draw(std::span<const float> logits, int64_t position, int64_t allowed) {
  const auto usable = logits.first(std::min(logits.size(), static_cast<size_t>(allowed)));
  const auto best = std::max_element(usable.begin(), usable.end());
  if (options_.temperature <= 0) return static_cast<int32_t>(best - usable.begin());

  ranked_.clear();
  double total = 0;
  for (size_t i = 0; i < usable.size(); ++i) {
    const double p = std::exp((double(usable[i]) - double(*best)) / options_.temperature);
    ranked_.emplace_back(p, static_cast<int32_t>(i));
    total += p;
  }
  std::sort(ranked_.begin(), ranked_.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
  double kept = 0;
  size_t count = 0;
  while (count < ranked_.size() && (count == 0 || kept < options_.top_p * total)) kept += ranked_[count++].first;

  double left = random_.uniform(static_cast<uint64_t>(position)) * kept;
  for (size_t i = 0; i < count; ++i) {
    left -= ranked_[i].first;
    if (left <= 0) return ranked_[i].second;
  }
  return ranked_[count - 1].second;
}

}  // namespace tessera::infer
