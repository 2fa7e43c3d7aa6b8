#include "config/nearest.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace tessera::config {

int64_t edit_distance(std::string_view a, std::string_view b) {
  // Rows of the table of distances between prefixes: two above (for swaps), one above, and the one being filled.
  std::vector<int64_t> above2(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    std::swap(above2, above);
    std::swap(above, row);
    row[0] = static_cast<int64_t>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int64_t substituted = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, substituted});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], above2[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string nearest(std::string_view word, std::span<const std::string> known) {
  int64_t best_distance = std::max<int64_t>(static_cast<int64_t>(word.size()) / 3, 1) + 1;
  std::string best;
  for (const std::string& candidate : known) {
    const int64_t distance = edit_distance(word, candidate);
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = candidate;
  }
  return best;
}

std::string did_you_mean(std::string_view word) {
  return word.empty() ? std::string() : fmt::format("; did you mean '{}'?", word);
}

}  // namespace tessera::config
