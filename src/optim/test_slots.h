// What the optimiser's tests share: parameters with random contents in an arena, and plain float64 products.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/philox.h"
#include "optim/optimizer.h"

namespace tessera::optim {

using Values = std::vector<double>;

inline Values random_values(uint64_t seed, int64_t count, double scale = 1) {
  const Philox rng(seed, Purpose::test);
  Values values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = scale * rng.normal(i);
  return values;
}

template <class Real>
void write(const View& view, const Values& values) {
  for (size_t i = 0; i < values.size(); ++i) view.as<Real>()[i] = Real(values[i]);
}

inline Values read(const View& view) {
  Values values(static_cast<size_t>(view.elements()));
  dispatch_real(view.dtype(), [&](auto real) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = double(view.as<decltype(real)>()[i]);
  });
  return values;
}

// An arena with poisoned allocations, and slots in it.
struct Bench {
  explicit Bench(DType type = DType::f32) : dtype(type), arena(int64_t{1} << 28) { arena.set_poison(true); }

  Slot slot(const std::string& name, const tessera::Shape& shape, Rule rule, int64_t blocks, double weight_decay,
            uint64_t seed, double gradient_scale = 1) {
    const Slot s{name, arena.allocate(dtype, shape), arena.allocate(dtype, shape), rule, blocks, weight_decay};
    fill(s.value, random_values(seed, shape.elements()));
    fill(s.gradient, random_values(seed + 1000, shape.elements(), gradient_scale));
    return s;
  }
  void fill(const View& view, const Values& values) const {
    dispatch_real(dtype, [&](auto real) { write<decltype(real)>(view, values); });
  }

  DType dtype;
  Arena arena;
  Ledger ledger;
  Context context{Device::cpu, arena, &ledger};
};

inline double relative_error(const Values& found, const Values& wanted) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference += (found[i] - wanted[i]) * (found[i] - wanted[i]);
    size += wanted[i] * wanted[i];
  }
  return std::sqrt(difference / (size > 0 ? size : 1));
}

}  // namespace tessera::optim
