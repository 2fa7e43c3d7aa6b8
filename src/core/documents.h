// Packed documents: T tokens of N documents laid end to end, with hard boundaries at 64-bit offsets.
#pragma once

#include <cstdint>
#include <span>

#include "core/context.h"

namespace tessera {

struct Documents {
  std::span<const int64_t> offsets;      // (N + 1): 0 = offsets[0] <= ... <= offsets[N] = T; empty documents are legal
  const int64_t* gpu_offsets = nullptr;  // the same on the GPU, where the device is cuda

  bool present() const { return !offsets.empty(); }  // false: none are given
  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t tokens() const { return offsets.back(); }
  int64_t begin(int64_t n) const { return offsets[static_cast<size_t>(n)]; }
  int64_t end(int64_t n) const { return offsets[static_cast<size_t>(n) + 1]; }
  int64_t length(int64_t n) const { return end(n) - begin(n); }

  void check(int64_t tokens) const {
    TESSERA_CHECK(offsets.size() >= 1 && offsets.front() == 0, "document offsets must begin with 0");
    for (size_t i = 1; i < offsets.size(); ++i) {
      TESSERA_CHECK(offsets[i] >= offsets[i - 1], "document offsets fall from {} to {}", offsets[i - 1], offsets[i]);
    }
    TESSERA_CHECK(offsets.back() == tokens, "document offsets end at {}, tokens are {}", offsets.back(), tokens);
  }
};

// With the offsets on the GPU too, taken from the arena, where the back end is cuda. `offsets` must outlive the result.
Documents place_documents(Context&, std::span<const int64_t> offsets);

}  // namespace tessera
