// Which source gives the next sequence.
//
// With T_s tokens given by source s, T their sum and w_s the weights (sum 1), the choice is the s that maximises
// w_s (T + C) - T_s, ties to the lower index. For sequences of at most C tokens that keeps |T_s - w_s T| <= C (S - 1)
// at all times, with no random numbers and no state but the counters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::data {

class Mixer {
 public:
  // Weights are scaled to sum 1. A source of weight 0 is never chosen.
  Mixer(std::vector<double> weights, int64_t context);

  int choose() const;  // -1 when no source is left
  void give(int source, int64_t tokens);
  // Takes a source out: its weight goes to the others in proportion, and counting begins anew.
  void drop(int source);

  double weight(int source) const { return weights_[static_cast<size_t>(source)]; }
  int64_t given(int source) const { return given_[static_cast<size_t>(source)]; }
  int64_t total() const { return total_; }

 private:
  void scale();

  std::vector<double> weights_;
  std::vector<int64_t> given_;
  int64_t total_ = 0;
  int64_t context_;
};

}  // namespace tessera::data
