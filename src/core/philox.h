// Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// A draw is a pure function of (seed, purpose, step, index): no state to save, no order to keep, so a resumed run and
// any layout of processes see the same numbers.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace tessera {

enum class Purpose : uint32_t { init = 1, sampling = 2, data_order = 3, guard = 4, test = 5, eval = 6 };

class Philox {
 public:
  Philox(uint64_t seed, Purpose purpose, uint64_t step = 0)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        purpose_(static_cast<uint32_t>(purpose)),
        step_(static_cast<uint32_t>(step)) {}

  std::array<uint32_t, 4> block(uint64_t index) const {
    std::array<uint32_t, 4> c{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), step_, purpose_};
    std::array<uint32_t, 2> k = key_;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
      c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
      k[0] += 0x9E3779B9u;
      k[1] += 0xBB67AE85u;
    }
    return c;
  }

  uint64_t bits(uint64_t index) const {
    const auto b = block(index);
    return (uint64_t{b[1]} << 32) | b[0];
  }
  double uniform(uint64_t index) const { return (static_cast<double>(bits(index) >> 11) + 0.5) * 0x1.0p-53; }  // (0, 1)
  double normal(uint64_t index) const {  // Box-Muller on the two halves of one block
    const auto b = block(index);
    const double u1 = (static_cast<double>(((uint64_t{b[1]} << 32) | b[0]) >> 11) + 0.5) * 0x1.0p-53;
    const double u2 = (static_cast<double>(((uint64_t{b[3]} << 32) | b[2]) >> 11) + 0.5) * 0x1.0p-53;
    return std::sqrt(-2.0 * std::log(u1)) * std::cos(6.283185307179586 * u2);
  }

 private:
  std::array<uint32_t, 2> key_;
  uint32_t purpose_;
  uint32_t step_;
};

}  // namespace tessera
