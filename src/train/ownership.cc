#include "train/ownership.h"

#include <algorithm>

namespace tessera::train {
namespace {

using Parts = std::span<const optim::Slot>;

int64_t elements_of(Parts parts) {
  int64_t n = 0;
  for (const optim::Slot& part : parts) n += part.value.elements();
  return n;
}

// Calls f(view of a part, its range of the buffer) for the parts that have one.
template <class F>
void lay_out(Parts parts, View optim::Slot::*field, const View& buffer, F&& f) {
  int64_t begin = 0;
  for (const optim::Slot& part : parts) {
    const View& view = part.*field;
    if (!view.present()) continue;
    f(view, buffer.row_range(begin, view.elements()).reshaped(view.shape()));
    begin += view.elements();
  }
}

void pack(Parts parts, View optim::Slot::*field, const View& buffer) {
  lay_out(parts, field, buffer, [](const View& view, const View& room) { copy(view, room); });
}
void unpack(const View& buffer, View optim::Slot::*field, Parts parts) {
  lay_out(parts, field, buffer, [](const View& view, const View& room) { copy(room, view); });
}

}  // namespace

Ownership::Ownership(std::vector<Shared> shared, dist::Mesh* mesh) : mesh_(mesh) {
  std::vector<optim::Slot> of_axis[2];
  for (const Shared& s : shared) of_axis[mesh != nullptr && s.expert ? 1 : 0].push_back(s.slot);
  for (int i = 0; i < 2; ++i) {
    const std::vector<optim::Slot>& slots = of_axis[i];
    dist::Communicator* axis = mesh == nullptr ? nullptr : i == 1 ? &mesh->expert_replica : &mesh->replica;
    if (axis == nullptr || axis->alone()) {
      own_.insert(own_.end(), slots.begin(), slots.end());
      continue;
    }
    Group group{axis, std::vector<std::vector<optim::Slot>>(static_cast<size_t>(axis->size()))};
    for (const optim::Part& part : optim::share_out(slots, axis->size())) {
      group.parts[static_cast<size_t>(part.owner)].push_back(part_of(slots[part.slot], part));
    }
    const auto& mine = group.parts[static_cast<size_t>(axis->rank())];
    own_.insert(own_.end(), mine.begin(), mine.end());
    groups_.push_back(std::move(group));
  }
}

template <class F>
void Ownership::for_each_bucket(F&& f) const {
  for (const Group& group : groups_) {
    const size_t owners = group.parts.size();
    const int64_t most = kBucketBytes / int64_t(sizeof(float)) / int64_t(owners);
    std::vector<size_t> next(owners, 0);
    for (bool left = true; left;) {
      left = false;
      std::vector<Parts> bucket;
      for (size_t r = 0; r < owners; ++r) {
        const size_t begin = next[r];
        int64_t elements = 0;
        while (next[r] < group.parts[r].size() && (next[r] == begin || elements < most)) {
          elements += group.parts[r][next[r]++].value.elements();
        }
        bucket.push_back(Parts(group.parts[r]).subspan(begin, next[r] - begin));
        left = left || next[r] < group.parts[r].size();
      }
      f(group, bucket);
    }
  }
}

void Ownership::reduce_gradients(Context& ctx) const {
  for_each_bucket([&](const Group& group, const std::vector<Parts>& bucket) {
    Arena::Scope scope(ctx.arena);
    std::vector<View> contributions;
    for (const Parts& parts : bucket) {
      contributions.push_back(ctx.arena.allocate(DType::f32, {elements_of(parts)}));
      pack(parts, &optim::Slot::gradient, contributions.back());
    }
    const size_t self = static_cast<size_t>(group.axis->rank());
    group.axis->reduce_scatter(ctx, contributions, contributions[self]);
    unpack(contributions[self], &optim::Slot::gradient, bucket[self]);
    for (size_t r = 0; r < bucket.size(); ++r) {
      for (const optim::Slot& part : bucket[r]) {
        if (r != self) part.gradient.zero();
      }
    }
  });
}

void Ownership::publish(Context& ctx, Field field) const {
  for_each_bucket([&](const Group& group, const std::vector<Parts>& bucket) {
    Arena::Scope scope(ctx.arena);
    std::vector<View> values;
    for (const Parts& parts : bucket) {
      int64_t elements = 0;
      DType dtype = DType::f32;
      for (const optim::Slot& part : parts) {
        const View& view = part.*field;
        elements += view.elements();
        if (view.present()) dtype = view.dtype();
      }
      values.push_back(ctx.arena.allocate(dtype, {elements}));
    }
    const size_t self = static_cast<size_t>(group.axis->rank());
    pack(bucket[self], field, values[self]);
    group.axis->all_gather(values);
    for (size_t r = 0; r < bucket.size(); ++r) {
      if (r != self) unpack(values[r], field, bucket[r]);
    }
  });
}

// On a GPU masters and working copies both: the guard splits experts by their masters, wherever these are trained.
void Ownership::publish_values(Context& ctx) const {
  publish(ctx, &optim::Slot::value);
  if (ctx.back_end() == Device::cuda) publish(ctx, &optim::Slot::copy);
}

double Ownership::sum(double value) const { return mesh_ == nullptr ? value : mesh_->world.sum(value); }

}  // namespace tessera::train
