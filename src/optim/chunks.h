// Cuts slots into chunks of elements that are the same for every number of threads: work is shared out by chunk, and
// sums are taken inside a chunk, then over the chunks in order.
//
// No chunk reaches across a block, so that a slot of n blocks and n slots of one block give the same chunks, hence the
// same sums. A chunk is found by arithmetic: a list of them would be long for a dry run of a trillion parameters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/optimizer.h"

namespace tessera::optim {

inline constexpr int64_t kChunkElements = 8192;  // 32 KiB of float32: one operand fills a first-level cache
inline constexpr int64_t kChunkGrain = 4;        // fewer chunks than this a thread do not pay for waking it

inline int64_t chunks_of(int64_t elements) { return (elements + kChunkElements - 1) / kChunkElements; }

class Chunks {
 public:
  explicit Chunks(std::span<const Slot> slots) : slots_(slots), first_{0} {  // of every slot
    for (const Slot& s : slots_) first_.push_back(first_.back() + s.blocks * chunks_of(s.value.elements() / s.blocks));
  }
  Chunks(std::span<const Slot> slots, Rule only) : slots_(slots), first_{0} {  // of the slots of one rule
    for (const Slot& s : slots_) {
      const int64_t own = s.rule == only ? s.blocks * chunks_of(s.value.elements() / s.blocks) : 0;
      first_.push_back(first_.back() + own);
    }
  }

  int64_t count() const { return first_.back(); }

  // Calls f(chunk, slot index, begin, end) for chunks [from, to); begin and end count elements of the slot.
  template <class F>
  void for_each(int64_t from, int64_t to, F&& f) const {
    size_t slot = static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), from) - first_.begin()) - 1;
    for (int64_t chunk = from; chunk < to; ++chunk) {
      while (chunk >= first_[slot + 1]) ++slot;
      const int64_t block_elements = slots_[slot].value.elements() / slots_[slot].blocks;
      const int64_t in_slot = chunk - first_[slot], per_block = chunks_of(block_elements);
      const int64_t block = in_slot / per_block, offset = in_slot % per_block * kChunkElements;
      const int64_t length = std::min(kChunkElements, block_elements - offset);
      f(chunk, slot, block * block_elements + offset, block * block_elements + offset + length);
    }
  }

 private:
  std::span<const Slot> slots_;
  std::vector<int64_t> first_;  // (slots + 1): number of the first chunk of each slot
};

}  // namespace tessera::optim
