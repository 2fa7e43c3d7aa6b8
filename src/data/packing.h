// Packing documents into sequences of a fixed context length.
//
// Documents longer than the context C are cut into pieces of C; a last piece shorter than min(1,024, C/8) is joined to
// the one before and the two are made equal, since a short orphan of a long document teaches little. Everything that is
// shorter than C goes, longest first, into the fullest sequence with enough room (best fit decreasing).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera::data {

// Lengths of the pieces that a document of `length` tokens is cut into, in order.
std::vector<int64_t> cut_lengths(int64_t length, int64_t context);

// Items of bin b: items[begin[b]], ..., items[begin[b + 1] - 1], in the order they were placed.
struct Bins {
  std::vector<int64_t> begin{0};
  std::vector<int64_t> items;  // indices into the lengths

  int64_t count() const { return static_cast<int64_t>(begin.size()) - 1; }
  std::span<const int64_t> bin(int64_t b) const;
};

// Every length is in [1, capacity]. Equal lengths keep their order; among equally full bins the one filled last is
// taken. O(n log n + n log capacity).
Bins pack_best_fit(std::span<const int64_t> lengths, int64_t capacity);

}  // namespace tessera::data
