// Which process trains which part of the parameters (ZeRO-1), and the exchanges that follow from it.
//
// Processes that hold the same parameters (the replica axis; for experts the expert replica axis) share them out. After
// the backward pass every part's gradient is summed at its owner; the owner updates; the new values go to everyone.
// Each of the two moves (n - 1) / n of the parameters per process, in buckets, so that the room they take is bounded.
#pragma once

#include "dist/mesh.h"
#include "optim/parts.h"

namespace tessera::train {

constexpr int64_t kBucketBytes = int64_t{64} << 20;  // that are exchanged together: float32, over all owners

class Ownership {
 public:
  struct Shared {
    optim::Slot slot;
    bool expert = false;  // differs along the expert axis
  };
  // `mesh` null: one process owns everything, and nothing is exchanged.
  Ownership(std::vector<Shared> slots, dist::Mesh* mesh);

  const std::vector<optim::Slot>& own() const { return own_; }  // what this process updates, in the order of the slots

  // Gradients of own parts become the sums over everyone, all others zero.
  void reduce_gradients(Context&) const;
  void publish_values(Context&) const;  // of everyone's parts, from their owners
  double sum(double) const;             // over all processes, of what each has for its own parts

 private:
  // The slots of one axis.
  struct Group {
    dist::Communicator* axis;
    std::vector<std::vector<optim::Slot>> parts;  // by owner
  };
  using Field = View optim::Slot::*;
  // Calls f(group, buckets): buckets[r] are the parts of owner r that go together.
  template <class F>
  void for_each_bucket(F&& f) const;
  void publish(Context&, Field) const;

  std::vector<Group> groups_;  // of axes with more than one process
  std::vector<optim::Slot> own_;
  dist::Mesh* mesh_;
};

}  // namespace tessera::train
