#include "model/mla_context.h"

#include <algorithm>

#include "ops/elementwise/op.h"

namespace tessera::model::mla_layer {
namespace {

// Rows of the micro-batch that `owner` has and `reader` wants beside its own.
struct Range {
  int64_t begin, end;
  int64_t count() const { return std::max<int64_t>(0, end - begin); }
};
Range read_by(const ContextShard& shard, int reader, int owner) {
  if (reader <= owner || shard.tokens(reader) == 0) return {0, 0};
  return {std::max(shard.first_begin(reader), shard.begin(owner)), shard.end(owner)};
}

std::vector<View> nothing_for(const ContextShard& shard) {
  return std::vector<View>(static_cast<size_t>(shard.size()));
}

}  // namespace

int64_t key_rows(const LayerContext& lc) { return lc.shard != nullptr ? lc.shard->key_offsets().back() : lc.tokens; }

Documents key_documents(const LayerContext& lc) {
  if (lc.shard == nullptr || key_rows(lc) == lc.tokens) return lc.documents;
  return place_documents(lc.ctx, lc.shard->key_offsets());
}

void gather_keys(const LayerContext& lc, const View& own, const View& keys) {
  const ContextShard& shard = *lc.shard;
  const int self = shard.rank();
  const int64_t first = shard.first_begin(self);
  std::vector<View> send = nothing_for(shard), receive = send;
  for (int r = 0; r < shard.size(); ++r) {
    const Range to = read_by(shard, r, self), from = read_by(shard, self, r);
    if (to.count() > 0) send[size_t(r)] = own.row_range(to.begin - shard.begin(self), to.count());
    if (from.count() > 0) receive[size_t(r)] = keys.row_range(from.begin - first, from.count());
  }
  copy(own, keys.row_range(shard.begin(self) - first, lc.tokens));
  shard.axis().all_to_all(send, receive);
}

void return_key_gradients(const LayerContext& lc, const View& d_keys, const View& d_own) {
  const ContextShard& shard = *lc.shard;
  const int self = shard.rank();
  const int64_t first = shard.first_begin(self), begin = shard.begin(self);
  Arena::Scope scope(lc.ctx.arena);
  std::vector<View> send = nothing_for(shard), receive = send;
  for (int r = 0; r < shard.size(); ++r) {
    const Range to = read_by(shard, self, r), from = read_by(shard, r, self);
    if (to.count() > 0) send[size_t(r)] = d_keys.row_range(to.begin - first, to.count());
    if (from.count() > 0) receive[size_t(r)] = lc.allocate({from.count(), d_own.dim(1)});
  }
  shard.axis().all_to_all(send, receive);
  copy(d_keys.row_range(begin - first, lc.tokens), d_own);
  for (int r = self + 1; r < shard.size(); ++r) {
    const Range from = read_by(shard, r, self);
    if (from.count() > 0) {
      ops::elementwise::add_to(lc.ctx, receive[size_t(r)], d_own.row_range(from.begin - begin, from.count()));
    }
  }
}

}  // namespace tessera::model::mla_layer
