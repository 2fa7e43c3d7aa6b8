// What the processes of the tensor axis owe each other between the backward pass and the next step.
//
// Elements are updated where they lie, and so are Muon's matrices that are one head's. A matrix that is cut through is
// orthogonalised whole, by one process of the axis: gradient and value go to it, the new value comes back, and it
// keeps the momentum. Parameters that all heads share have their gradients summed, and everyone updates them alike.
#pragma once

#include <span>
#include <vector>

#include "dist/communicator.h"
#include "model/parameters.h"
#include "train/buckets.h"

namespace tessera::train {

// A slot, or a part of one, and how it lies along the tensor axis: of model::Parameter.
struct HeldSlot {
  optim::Slot slot;
  model::Cut cut = model::Cut::none;
  bool cut_through = false;
  Shape whole = {};  // where it is cut through
};

class TensorExchange {
 public:
  // `held`: the same parameters in every process of the axis. `axis` null: this process alone.
  TensorExchange(Arena&, const std::vector<HeldSlot>& held, dist::Communicator* axis);

  const std::vector<optim::Slot>& slots() const { return slots_; }  // what this process updates
  // The first of them, among which no element is found twice along the axis.
  std::span<const optim::Slot> counted() const { return std::span(slots_).first(counted_); }

  void gather(Context&) const;   // gradients to who updates them
  void scatter(Context&) const;  // new values to where they lie

 private:
  enum class To : uint8_t { owners, parts };
  void add_whole_matrices(Arena&, const std::vector<HeldSlot>& cut_through);
  void sum_gradients(Context&) const;
  void move(Context&, Field, To) const;

  dist::Communicator* axis_ = nullptr;  // null where there is nobody else
  std::vector<optim::Slot> slots_;
  size_t counted_ = 0;
  std::vector<std::vector<optim::Slot>> summed_;  // one list: gradients that are terms of sums
  std::vector<std::vector<optim::Slot>> parts_;   // by owner: this process's parts of matrices
  std::vector<std::vector<optim::Slot>> pieces_;  // by process: its parts, as they lie in the matrices owned here
};

}  // namespace tessera::train
