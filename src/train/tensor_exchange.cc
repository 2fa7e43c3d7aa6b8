#include "train/tensor_exchange.h"

#include "optim/parts.h"

namespace tessera::train {

using model::Cut;

TensorExchange::TensorExchange(Arena& arena, const std::vector<HeldSlot>& held, dist::Communicator* axis) {
  std::vector<optim::Slot> same;  // in every process of the axis
  std::vector<HeldSlot> cut_through;
  summed_.resize(1);
  for (const HeldSlot& h : held) {
    if (h.cut_through) {
      cut_through.push_back(h);
    } else if (h.cut == Cut::rows || h.cut == Cut::columns) {
      slots_.push_back(h.slot);
    } else {
      same.push_back(h.slot);
    }
    if (h.cut == Cut::partial) summed_.front().push_back(h.slot);
  }
  if (axis != nullptr && !axis->alone()) {
    axis_ = axis;
    add_whole_matrices(arena, cut_through);
  }
  counted_ = slots_.size() + (axis_ == nullptr || axis_->rank() == 0 ? same.size() : 0);
  slots_.insert(slots_.end(), same.begin(), same.end());
}

// The part of process `rank`.
static View part_of(const View& whole, Cut cut, const Shape& part, int64_t rank) {
  if (!whole.present()) return {};
  return cut == Cut::rows ? whole.row_range(rank * part[0], part[0]) : whole.column_range(rank * part[1], part[1]);
}

void TensorExchange::add_whole_matrices(Arena& arena, const std::vector<HeldSlot>& cut_through) {
  Arena::Label label(arena, "whole matrices");
  std::vector<optim::Slot> whole;
  for (const HeldSlot& h : cut_through) {
    whole.push_back(h.slot);
    whole.back().value = whole.back().gradient = View(nullptr, DType::f32, h.whole);
    whole.back().copy = {};
    whole.back().first_row = 0;
  }
  parts_.resize(static_cast<size_t>(axis_->size()));
  pieces_.resize(parts_.size());
  for (const optim::Part& p : optim::share_out(whole, axis_->size())) {
    const HeldSlot& h = cut_through[p.slot];
    parts_[static_cast<size_t>(p.owner)].push_back(h.slot);
    if (p.owner != axis_->rank()) continue;
    optim::Slot& own = whole[p.slot];
    own.value = arena.allocate(DType::f32, h.whole);
    own.gradient = arena.allocate_zeroed(DType::f32, h.whole);
    if (h.slot.copy.present()) own.copy = arena.allocate(h.slot.copy.dtype(), h.whole);
    slots_.push_back(own);
    for (int r = 0; r < axis_->size(); ++r) {
      optim::Slot piece = own;
      for (const Field field : {&optim::Slot::value, &optim::Slot::gradient, &optim::Slot::copy}) {
        piece.*field = part_of(own.*field, h.cut, h.slot.value.shape(), r);
      }
      pieces_[static_cast<size_t>(r)].push_back(piece);
    }
  }
}

void TensorExchange::sum_gradients(Context& ctx) const {
  for_each_bucket(summed_, [&](const std::vector<Parts>& bucket) {
    Arena::Scope scope(ctx.arena);
    const View terms = room_for(ctx, bucket.front(), &optim::Slot::gradient);
    pack(bucket.front(), &optim::Slot::gradient, terms);
    axis_->all_reduce(ctx, terms);
    unpack(terms, &optim::Slot::gradient, bucket.front());
  });
}

void TensorExchange::move(Context& ctx, Field field, To to) const {
  const size_t self = static_cast<size_t>(axis_->rank()), count = parts_.size();
  for_each_bucket(parts_, [&](const std::vector<Parts>& bucket) {
    Arena::Scope scope(ctx.arena);
    const Parts own = bucket[self];  // the parts of all processes of these matrices are here, or come here
    const size_t first = static_cast<size_t>(own.data() - parts_[self].data());
    const auto pieces = [&](size_t r) { return Parts(pieces_[r]).subspan(first, own.size()); };
    std::vector<View> by_owner, by_process;
    for (size_t r = 0; r < count; ++r) {
      by_owner.push_back(room_for(ctx, bucket[r], field));
      by_process.push_back(room_for(ctx, own, field));
    }
    if (to == To::owners) {
      for (size_t r = 0; r < count; ++r) pack(bucket[r], field, by_owner[r]);
      axis_->all_to_all(by_owner, by_process);
      for (size_t r = 0; r < count; ++r) unpack(by_process[r], field, pieces(r));
    } else {
      for (size_t r = 0; r < count; ++r) pack(pieces(r), field, by_process[r]);
      axis_->all_to_all(by_process, by_owner);
      for (size_t r = 0; r < count; ++r) unpack(by_owner[r], field, bucket[r]);
    }
  });
}

void TensorExchange::gather(Context& ctx) const {
  if (axis_ == nullptr) return;
  sum_gradients(ctx);
  move(ctx, &optim::Slot::gradient, To::owners);
  move(ctx, &optim::Slot::value, To::owners);
}

void TensorExchange::scatter(Context& ctx) const {
  if (axis_ == nullptr) return;
  move(ctx, &optim::Slot::value, To::parts);
  if (ctx.back_end() == Device::cuda) move(ctx, &optim::Slot::copy, To::parts);
}

}  // namespace tessera::train
