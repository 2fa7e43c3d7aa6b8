// Deterministic document order: a keyed pseudo-random permutation of [0, n) with random access and no memory.
//
// A 4-round Feistel network on the smallest even number of bits that holds n - 1; a value that lands at n or above is
// sent through again (cycle-walking), which ends because the network is a bijection of a set at most 4 times as large.
#pragma once

#include <bit>
#include <cstdint>

#include "core/error.h"

namespace tessera::data {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class Permutation {
 public:
  // Equal (n, seed, source, epoch) give the same permutation; `source` and `epoch` may number anything else.
  Permutation(int64_t n, uint64_t seed, uint64_t source, uint64_t epoch)
      : n_(static_cast<uint64_t>(n)), key_(mix64(mix64(mix64(seed) ^ source) ^ epoch)) {
    TESSERA_CHECK(n >= 1, "a permutation of {} elements", n);
    const int bits = std::bit_width(n_ - 1);
    half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
  }

  int64_t operator()(int64_t position) const {
    uint64_t x = static_cast<uint64_t>(position);
    do {
      x = forward(x);
    } while (x >= n_);
    return static_cast<int64_t>(x);
  }

  int64_t inverse(int64_t element) const {
    uint64_t x = static_cast<uint64_t>(element);
    do {
      x = backward(x);
    } while (x >= n_);
    return static_cast<int64_t>(x);
  }

 private:
  static constexpr uint64_t kRounds = 4;

  uint64_t mask() const { return (uint64_t{1} << half_bits_) - 1; }
  uint64_t round(uint64_t r, uint64_t half) const { return mix64(key_ ^ mix64(half * kRounds + r)) & mask(); }

  uint64_t forward(uint64_t x) const {
    uint64_t left = x >> half_bits_, right = x & mask();
    for (uint64_t r = 0; r < kRounds; ++r) {
      const uint64_t next = left ^ round(r, right);
      left = right;
      right = next;
    }
    return (left << half_bits_) | right;
  }

  uint64_t backward(uint64_t x) const {
    uint64_t left = x >> half_bits_, right = x & mask();
    for (uint64_t r = kRounds; r-- > 0;) {
      const uint64_t previous = right ^ round(r, left);
      right = left;
      left = previous;
    }
    return (left << half_bits_) | right;
  }

  uint64_t n_;
  uint64_t key_;
  int half_bits_;
};

}  // namespace tessera::data
