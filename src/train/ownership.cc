#include "train/ownership.h"

namespace tessera::train {

Ownership::Ownership(Arena& arena, std::vector<Shared> shared, dist::Mesh* mesh) : mesh_(mesh) {
  std::vector<HeldSlot> of_axis[2], own;
  for (const Shared& s : shared) of_axis[mesh != nullptr && s.expert ? 1 : 0].push_back(s.held);
  for (int i = 0; i < 2; ++i) {
    const std::vector<HeldSlot>& held = of_axis[i];
    dist::Communicator* axis = mesh == nullptr ? nullptr : i == 1 ? &mesh->expert_replica : &mesh->replica;
    if (axis == nullptr || axis->alone()) {
      own.insert(own.end(), held.begin(), held.end());
      continue;
    }
    std::vector<optim::Slot> slots;
    for (const HeldSlot& h : held) slots.push_back(h.slot);
    Group group{axis, std::vector<std::vector<optim::Slot>>(static_cast<size_t>(axis->size()))};
    for (const optim::Part& part : optim::share_out(slots, axis->size())) {
      const optim::Slot slot = part_of(slots[part.slot], part);
      group.parts[static_cast<size_t>(part.owner)].push_back(slot);
      if (part.owner != axis->rank()) continue;
      own.push_back(held[part.slot]);
      own.back().slot = slot;
    }
    groups_.push_back(std::move(group));
  }
  tensor_.emplace(arena, own, mesh == nullptr ? nullptr : &mesh->tensor);
}

template <class F>
void Ownership::for_each_bucket(F&& f) const {
  for (const Group& group : groups_) {
    train::for_each_bucket(group.parts, [&](const std::vector<Parts>& bucket) { f(group, bucket); });
  }
}

void Ownership::reduce_gradients(Context& ctx) const {
  for_each_bucket([&](const Group& group, const std::vector<Parts>& bucket) {
    Arena::Scope scope(ctx.arena);
    std::vector<View> contributions;
    for (const Parts& parts : bucket) {
      contributions.push_back(room_for(ctx, parts, &optim::Slot::gradient));
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
  tensor_->gather(ctx);
}

void Ownership::publish(Context& ctx, Field field) const {
  for_each_bucket([&](const Group& group, const std::vector<Parts>& bucket) {
    Arena::Scope scope(ctx.arena);
    std::vector<View> values;
    for (const Parts& parts : bucket) values.push_back(room_for(ctx, parts, field));
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
  tensor_->scatter(ctx);
  publish(ctx, &optim::Slot::value);
  if (ctx.back_end() == Device::cuda) publish(ctx, &optim::Slot::copy);
}

double Ownership::sum(double value) const { return mesh_ == nullptr ? value : mesh_->world.sum(value); }

}  // namespace tessera::train
