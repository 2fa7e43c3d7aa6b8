// Between the order of tokens and the order of experts.
//
// A slot is (token, choice), slot = t k + s. A row is a slot's place once slots are ordered by expert. Results of rows
// are put back by slot before they are summed, so the sum over a token's slots always has the same order.
#pragma once

#include <cstring>

#include "core/parallel.h"
#include "ops/experts/op.h"

namespace tessera::ops::experts {

// Fills `slots` and `offsets` from the indices: a stable counting sort. `cursor` (E + 1) i64 is scratch.
void order_by_expert(const Dims&, const View& indices, const View& slots, const View& offsets, const View& cursor);

// to[r] = token row of slots[r], for `count` rows; zeros up to `padded` rows.
template <class Real>
void gather_rows(const Dims& d, const View& from, const int64_t* slots, int64_t count, int64_t padded, Real* to) {
  const Real* source = from.as<Real>();
  for (int64_t r = 0; r < count; ++r) {
    std::copy_n(source + slots[r] / d.top_k * from.row_stride(), d.width, to + r * d.width);
  }
  std::fill_n(to + count * d.width, (padded - count) * d.width, Real(0));
}

template <class Real>
void scatter_rows(const Dims& d, const Real* from, const int64_t* slots, int64_t count, Real* by_slot) {
  for (int64_t r = 0; r < count; ++r) std::copy_n(from + r * d.width, d.width, by_slot + slots[r] * d.width);
}

// to[t] = sum over the token's slots, in slot order, of weight times by_slot; empty slots are left out. `weights`
// null: 1.
template <class Real>
void combine_slots(const Dims& d, const int32_t* indices, const Real* weights, const Real* by_slot, const View& to) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(d.top_k * d.width, 1));
  parallel_ranges(d.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Real* y = to.as<Real>() + t * to.row_stride();
      std::fill_n(y, d.width, Real(0));
      for (int64_t slot = t * d.top_k; slot < (t + 1) * d.top_k; ++slot) {
        if (indices[slot] < 0) continue;
        const Real p = weights == nullptr ? Real(1) : weights[slot];
        const Real* row = by_slot + slot * d.width;
#pragma omp simd
        for (int64_t i = 0; i < d.width; ++i) y[i] += p * row[i];
      }
    }
  });
}

}  // namespace tessera::ops::experts
