#include "model/kda_context.h"

#include <algorithm>

#include "ops/elementwise/op.h"

namespace tessera::model::kda_layer {
namespace {

// One map a process, gathered: the transition, then the offset.
struct Maps {
  View all;  // (P, H K K + H V K)
  int64_t heads, key_dim, value_dim;

  Maps(const LayerContext& lc, const ops::kda::Dims& d, int processes)
      : all(lc.ctx.arena.allocate_zeroed(exact_type(lc.dtype),
                                         {processes, d.value_heads * d.key_dim * (d.key_dim + d.value_dim)})),
        heads(d.value_heads),
        key_dim(d.key_dim),
        value_dim(d.value_dim) {}
  ops::kda::StateMap of(int rank, bool with_transition) const {
    const int64_t square = heads * key_dim * key_dim;
    const View row = all.at(rank);
    return {with_transition ? row.row_range(0, square).reshaped({heads, key_dim, key_dim}) : View(),
            row.row_range(square, heads * value_dim * key_dim).reshaped({heads, value_dim, key_dim})};
  }
};

View one_state(const LayerContext& lc, const ops::kda::Dims& d) {
  return lc.ctx.arena.allocate_zeroed(exact_type(lc.dtype), {1, d.value_heads, d.value_dim, d.key_dim});
}

}  // namespace

bool crosses(const LayerContext& lc) { return lc.shard != nullptr && lc.shard->any_crosses(); }

// ---- convolution ----

// The last W - 1 inputs of every process, right-aligned: window row j of process r, row j - (W - 1) of its end.
static int64_t first_row(const ContextShard& shard, int rank, int64_t width) {
  return std::max<int64_t>(0, width - 1 - shard.tokens(rank));  // rows before it are of nobody
}

// Calls f(owner, row of its window, row of this process's window) for the inputs before this process's first document.
template <class F>
static void for_each_earlier(const ContextShard& shard, int64_t width, F&& f) {
  const int64_t begin = shard.begin(shard.rank());
  for (int owner = 0; owner < shard.rank(); ++owner) {
    for (int64_t j = first_row(shard, owner, width); j < width - 1; ++j) {
      const int64_t position = shard.end(owner) - (width - 1) + j, row = position - (begin - (width - 1));
      if (position >= shard.first_begin(shard.rank()) && row >= 0) f(owner, j, row);
    }
  }
}

View allocate_window(const LayerContext& lc, int64_t channels, int64_t width) {
  const int64_t first = std::min<int64_t>(lc.documents.count(), 1);
  return lc.ctx.arena.allocate(lc.dtype, {first, width - 1, channels});
}

void window_from_left(const LayerContext& lc, const View& x, const View& window) {
  const ContextShard& shard = *lc.shard;
  const int64_t rows = window.dim(1), channels = x.dim(1), own = std::min(rows, lc.tokens);
  Arena::Scope scope(lc.ctx.arena);
  const View ends = lc.ctx.arena.allocate_zeroed(lc.dtype, {shard.size(), rows * channels});
  copy(x.row_range(lc.tokens - own, own), ends.at(shard.rank()).reshaped({rows, channels}).row_range(rows - own, own));
  shard.axis().all_gather(ends);
  window.zero();
  if (lc.documents.count() == 0) return;
  for_each_earlier(shard, rows + 1, [&](int owner, int64_t from, int64_t to) {
    copy(ends.at(owner).reshaped({rows, channels}).at(from), window.at(0).at(to));
  });
}

void window_gradient_to_left(const LayerContext& lc, const View& dwindow, const View& dx) {
  const ContextShard& shard = *lc.shard;
  const int64_t window = dwindow.dim(1), channels = dwindow.dim(2), own = std::min(window, lc.tokens);
  Arena::Scope scope(lc.ctx.arena);
  const View ends = lc.ctx.arena.allocate_zeroed(lc.dtype, {shard.size(), window * channels});
  std::vector<View> parts;
  for (int r = 0; r < shard.size(); ++r) parts.push_back(ends.at(r));
  if (lc.documents.count() > 0) {
    for_each_earlier(shard, window + 1, [&](int owner, int64_t to, int64_t from) {
      copy(dwindow.at(0).at(from), ends.at(owner).reshaped({window, channels}).at(to));
    });
  }
  shard.axis().reduce_scatter(lc.ctx, parts, parts[static_cast<size_t>(shard.rank())]);
  const View mine = ends.at(shard.rank()).reshaped({window, channels}).row_range(window - own, own);
  ops::elementwise::add_to(lc.ctx, mine, dx.row_range(lc.tokens - own, own));
}

// ---- states ----

View allocate_entering_state(const LayerContext& lc, const ops::kda::Dims& d) {
  return lc.shard->enters(lc.shard->rank()) ? one_state(lc, d) : View();
}

void entering_state(const LayerContext& lc, const ops::kda::Dims& d, const ops::kda::Inputs& in, const View& transition,
                    const View& state) {
  const ContextShard& shard = *lc.shard;
  const int self = shard.rank();
  Arena::Scope scope(lc.ctx.arena);
  const Maps maps(lc, d, shard.size());
  if (shard.leaves(self)) {
    const int64_t last = lc.documents.count() - 1;
    const bool whole = last == 0 && shard.enters(self);
    const ops::kda::StateMap map = maps.of(self, whole);
    ops::kda::state_map(lc.ctx, d, in, last, map);
    if (whole && transition.present()) copy(map.transition, transition);
  }
  shard.axis().all_gather(maps.all);
  for (int rank = 0; shard.enters(self) && rank < self; ++rank) {
    if (shard.tokens(rank) == 0 || shard.end(rank) <= shard.first_begin(self)) continue;
    const bool begins_here = shard.begin(rank) <= shard.first_begin(self);
    ops::kda::fold(lc.ctx, maps.of(rank, !begins_here), state.at(0));
  }
}

View leaving_gradient(const LayerContext& lc, const ops::kda::Dims& d, const ops::kda::Inputs& in,
                      const ops::kda::Saved& saved, const View& d_o, const View& transition) {
  if (!crosses(lc)) return {};
  const ContextShard& shard = *lc.shard;
  const int self = shard.rank();
  const View d_state = shard.leaves(self) ? one_state(lc, d) : View();
  Arena::Scope scope(lc.ctx.arena);
  const Maps maps(lc, d, shard.size());
  if (shard.enters(self)) {
    const ops::kda::StateMap map = maps.of(self, true);
    ops::kda::state_gradient_map(lc.ctx, d, in, saved, d_o, 0, map.offset);
    if (lc.documents.count() == 1 && shard.leaves(self)) copy(transition, map.transition);
  }
  shard.axis().all_gather(maps.all);
  for (int rank = shard.size() - 1; shard.leaves(self) && rank > self; --rank) {
    if (shard.tokens(rank) == 0 || shard.begin(rank) >= shard.last_end(self)) continue;
    const bool ends_here = shard.end(rank) >= shard.last_end(self);
    ops::kda::fold_gradient(lc.ctx, maps.of(rank, !ends_here), d_state.at(0));
  }
  return d_state;
}

}  // namespace tessera::model::kda_layer
