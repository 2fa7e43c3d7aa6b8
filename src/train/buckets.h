// Parts of parameters that travel together: packed one after the other into one buffer for each process, in buckets of
// bounded size.
#pragma once

#include <span>
#include <vector>

#include "optim/optimizer.h"

namespace tessera::train {

using Parts = std::span<const optim::Slot>;
using Field = View optim::Slot::*;

inline constexpr int64_t kBucketBytes = int64_t{64} << 20;  // of float32, over all owners

// Calls f(view of a part, its range of the buffer) for the parts that have one.
template <class F>
void lay_out(Parts parts, Field field, const View& buffer, F&& f) {
  int64_t begin = 0;
  for (const optim::Slot& part : parts) {
    const View& view = part.*field;
    if (!view.present()) continue;
    f(view, buffer.row_range(begin, view.elements()).reshaped(view.shape()));
    begin += view.elements();
  }
}

inline void pack(Parts parts, Field field, const View& buffer) {
  lay_out(parts, field, buffer, [](const View& view, const View& room) { copy(view, room); });
}
inline void unpack(const View& buffer, Field field, Parts parts) {
  lay_out(parts, field, buffer, [](const View& view, const View& room) { copy(room, view); });
}

// A buffer for one field of these parts.
inline View room_for(Context& ctx, Parts parts, Field field) {
  int64_t elements = 0;
  DType dtype = DType::f32;
  for (const optim::Slot& part : parts) {
    const View& view = part.*field;
    elements += view.elements();
    if (view.present()) dtype = view.dtype();
  }
  return ctx.arena.allocate(dtype, {elements});
}

// Calls f(bucket) until every part has gone: bucket[r] are the parts of owner r that go together.
template <class F>
void for_each_bucket(const std::vector<std::vector<optim::Slot>>& parts, F&& f) {
  const size_t owners = parts.size();
  const int64_t most = kBucketBytes / int64_t(sizeof(float)) / int64_t(owners);
  std::vector<size_t> next(owners, 0);
  for (bool left = true; left;) {
    left = false;
    std::vector<Parts> bucket;
    for (size_t r = 0; r < owners; ++r) {
      const size_t begin = next[r];
      int64_t elements = 0;
      while (next[r] < parts[r].size() && (next[r] == begin || elements < most)) {
        elements += parts[r][next[r]++].value.elements();
      }
      bucket.push_back(Parts(parts[r]).subspan(begin, next[r] - begin));
      left = left || next[r] < parts[r].size();
    }
    f(bucket);
  }
}

}  // namespace tessera::train
