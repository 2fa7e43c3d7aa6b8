// The pieces of a training state that lie in many processes, as whole tensors on the host: what a checkpoint is written
// from and read into. Checkpoints know nothing of layouts.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "ckpt/checkpoint.h"
#include "core/host_copy.h"
#include "dist/mesh.h"
#include "train/step.h"

namespace tessera::train {

// Of the pieces that each process saves, whole tensors in the first process; in the others none. On a CPU, tensors that
// lie there whole are not copied.
class GatheredState {
 public:
  GatheredState(const std::vector<Piece>& pieces, dist::Communicator* world);  // null: this process alone
  const std::vector<ckpt::TensorRef>& tensors() const { return tensors_; }

 private:
  View part_of(const Piece& piece);  // where it belongs
  void check_complete() const;

  std::vector<ckpt::TensorRef> tensors_;
  std::deque<HostCopy> copies_;
  std::map<std::string, std::vector<std::byte>> made_;
  std::map<std::string, int64_t> elements_;  // that have arrived
};

// Room on the host for every tensor of which a process keeps a part, and the way of that part back to where it lies.
class StagedState {
 public:
  explicit StagedState(const std::vector<Piece>& pieces);
  const std::vector<ckpt::TensorRef>& tensors() const { return tensors_; }
  void put_back() const;  // after the tensors were read

 private:
  std::vector<Piece> pieces_;  // that are not whole
  std::vector<ckpt::TensorRef> tensors_;
  std::deque<HostCopy> copies_;
  std::map<std::string, std::vector<std::byte>> made_;
};

}  // namespace tessera::train
