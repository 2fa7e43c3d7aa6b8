// The n largest values of a row, by (value falling, index rising): moe.md 1.1, steps 4 and 5.
//
// An ordered list of the best n so far is kept while the row is scanned upwards; whole vector blocks without a value
// above the list's last are skipped, so a row of E random values costs about E / 32 comparisons and n ln(E / n)
// insertions. Strictly-greater keeps the lower index in front on a tie. Values must not be NaN.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::ops::router {

template <class Real>
class TopList {
 public:
  TopList(Real* values, int32_t* indices, int64_t n) : values_(values), indices_(indices), n_(n) {}

  void select(const Real* c, int64_t count) {
    size_ = 0;
    int64_t j = 0;
    for (; j < std::min(n_, count); ++j) insert(c[j], j);
    for (; j < count; j += kBlock) {
      const int64_t end = std::min(j + kBlock, count);
      const Real last = values_[n_ - 1];
      int any = 0;
#pragma omp simd reduction(| : any)
      for (int64_t i = j; i < end; ++i) any |= c[i] > last ? 1 : 0;
      if (any == 0) continue;
      for (int64_t i = j; i < end; ++i) {
        if (c[i] > values_[n_ - 1]) insert(c[i], i);
      }
    }
  }

 private:
  static constexpr int64_t kBlock = 32;

  void insert(Real value, int64_t index) {
    int64_t p = size_ < n_ ? size_++ : n_ - 1;  // a full list drops its last
    for (; p > 0 && values_[p - 1] < value; --p) {
      values_[p] = values_[p - 1];
      indices_[p] = indices_[p - 1];
    }
    values_[p] = value;
    indices_[p] = static_cast<int32_t>(index);
  }

  Real* values_;
  int32_t* indices_;
  int64_t n_;
  int64_t size_ = 0;
};

}  // namespace tessera::ops::router
