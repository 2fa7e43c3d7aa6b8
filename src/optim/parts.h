// Cuts slots into parts with one owner each among processes that hold the same parameters, so that each of them keeps
// momenta and does the work for its share only (ZeRO-1). Muon's matrices stay whole. Source: moe.md 7.5.
#pragma once

#include "optim/optimizer.h"

namespace tessera::optim {

struct Part {
  size_t slot;
  int64_t first_row, rows;  // of the slot's leading axis
  int owner;
};

// Parts of every slot, in order; a function of shapes and rules alone. Muon: whole blocks, the longest work first to
// the owner with the least. AdamW: even ranges of rows (of blocks, where a slot has several).
std::vector<Part> share_out(std::span<const Slot>, int owners);
Slot part_of(const Slot&, const Part&);

}  // namespace tessera::optim
