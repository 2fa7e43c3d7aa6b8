#include "ops/experts/permute.h"

#include <algorithm>

namespace tessera::ops::experts {

void order_by_expert(const Dims& d, const View& indices, const View& slots, const View& offsets, const View& cursor) {
  const int64_t n = d.tokens * d.top_k;
  const int32_t* expert = indices.as<int32_t>();
  int64_t *begin = offsets.as<int64_t>(), *next = cursor.as<int64_t>(), *order = slots.as<int64_t>();
  std::fill_n(begin, d.experts + 1, int64_t{0});
  for (int64_t slot = 0; slot < n; ++slot) {
    TESSERA_CHECK(expert[slot] >= -1 && expert[slot] < d.experts, "slot {} chooses expert {} of {}", slot, expert[slot],
                  d.experts);
    if (expert[slot] >= 0) ++begin[expert[slot] + 1];
  }
  for (int64_t e = 0; e < d.experts; ++e) begin[e + 1] += begin[e];
  std::copy_n(begin, d.experts + 1, next);  // next[E]: where the empty slots go
  for (int64_t slot = 0; slot < n; ++slot) {
    const int64_t e = expert[slot] < 0 ? d.experts : expert[slot];
    order[next[e]++] = slot;
  }
}

}  // namespace tessera::ops::experts
