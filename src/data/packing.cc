#include "data/packing.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/error.h"

namespace tessera::data {
namespace {

constexpr int64_t kShortestPiece = 1024;
constexpr int64_t kNone = -1;

// A set of numbers in [0, limit]: bits in words, and one bit a word in the level above, so that the next member is
// found in as many steps as there are levels (4 for a million).
class NumberSet {
 public:
  explicit NumberSet(int64_t limit) {
    size_t words = static_cast<size_t>(limit) / 64 + 1;
    levels_.emplace_back(words, 0);
    while (words > 1) {
      words = (words + 63) / 64;
      levels_.emplace_back(words, 0);
    }
  }

  void insert(int64_t value) {
    size_t at = static_cast<size_t>(value);
    for (auto& level : levels_) {
      level[at / 64] |= uint64_t{1} << (at % 64);
      at /= 64;
    }
  }

  void erase(int64_t value) {
    size_t at = static_cast<size_t>(value);
    for (auto& level : levels_) {
      level[at / 64] &= ~(uint64_t{1} << (at % 64));
      if (level[at / 64] != 0) return;
      at /= 64;
    }
  }

  // The smallest member >= value, or kNone.
  int64_t next(int64_t value) const {
    size_t at = static_cast<size_t>(value);
    for (size_t level = 0; level < levels_.size(); ++level) {
      const size_t word = at / 64;
      if (word >= levels_[level].size()) return kNone;
      const uint64_t rest = levels_[level][word] >> (at % 64);
      if (rest != 0) return descend(level, at + static_cast<size_t>(std::countr_zero(rest)));
      at = word + 1;
    }
    return kNone;
  }

 private:
  int64_t descend(size_t level, size_t at) const {
    while (level-- > 0) at = at * 64 + static_cast<size_t>(std::countr_zero(levels_[level][at]));
    return static_cast<int64_t>(at);
  }

  std::vector<std::vector<uint64_t>> levels_;
};

// Open bins by the room they have left: per room a stack of bins, linked through `below_`.
class Rooms {
 public:
  explicit Rooms(int64_t capacity) : rooms_(capacity), top_(static_cast<size_t>(capacity) + 1, kNone) {}

  void push(int64_t bin, int64_t room) {
    if (static_cast<size_t>(bin) >= below_.size()) below_.resize(static_cast<size_t>(bin) + 1, kNone);
    below_[static_cast<size_t>(bin)] = top_[static_cast<size_t>(room)];
    top_[static_cast<size_t>(room)] = bin;
    rooms_.insert(room);
  }

  // Takes out the bin with the least room that is at least `length`: (bin, room), or (kNone, 0).
  std::pair<int64_t, int64_t> pop(int64_t length) {
    const int64_t room = rooms_.next(length);
    if (room == kNone) return {kNone, 0};
    const int64_t bin = top_[static_cast<size_t>(room)];
    top_[static_cast<size_t>(room)] = below_[static_cast<size_t>(bin)];
    if (top_[static_cast<size_t>(room)] == kNone) rooms_.erase(room);
    return {bin, room};
  }

 private:
  NumberSet rooms_;
  std::vector<int64_t> top_, below_;
};

}  // namespace

std::vector<int64_t> cut_lengths(int64_t length, int64_t context) {
  TESSERA_CHECK(length >= 1 && context >= 2, "cutting {} tokens to {}", length, context);
  std::vector<int64_t> pieces(static_cast<size_t>(length / context), context);
  const int64_t rest = length % context;
  if (rest == 0) return pieces;
  pieces.push_back(rest);
  if (pieces.size() >= 2 && rest < std::min(kShortestPiece, std::max<int64_t>(2, context / 8))) {
    const int64_t both = context + rest;
    pieces[pieces.size() - 2] = (both + 1) / 2;
    pieces[pieces.size() - 1] = both / 2;
  }
  return pieces;
}

std::span<const int64_t> Bins::bin(int64_t b) const {
  const size_t i = static_cast<size_t>(b);
  return std::span(items).subspan(static_cast<size_t>(begin[i]), static_cast<size_t>(begin[i + 1] - begin[i]));
}

Bins pack_best_fit(std::span<const int64_t> lengths, int64_t capacity) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  const auto length_of = [&](int64_t i) { return lengths[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return length_of(a) > length_of(b); });

  Rooms rooms(capacity);
  std::vector<int64_t> bin_of(lengths.size()), sizes;
  for (const int64_t i : order) {
    const int64_t length = length_of(i);
    TESSERA_CHECK(length >= 1 && length <= capacity, "packing {} tokens into {}", length, capacity);
    auto [bin, room] = rooms.pop(length);
    if (bin == kNone) {
      bin = static_cast<int64_t>(sizes.size());
      room = capacity;
      sizes.push_back(0);
    }
    bin_of[static_cast<size_t>(i)] = bin;
    ++sizes[static_cast<size_t>(bin)];
    if (room > length) rooms.push(bin, room - length);
  }

  Bins bins;
  bins.items.resize(lengths.size());
  for (const int64_t size : sizes) bins.begin.push_back(bins.begin.back() + size);
  std::vector<int64_t> at(bins.begin.begin(), bins.begin.end() - 1);
  for (const int64_t i : order) {
    bins.items[static_cast<size_t>(at[static_cast<size_t>(bin_of[static_cast<size_t>(i)])]++)] = i;
  }
  return bins;
}

}  // namespace tessera::data
