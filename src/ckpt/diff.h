// What differs between two sets of tensors, whatever files they lie in.
#pragma once

#include <string>
#include <vector>

#include "ckpt/collection.h"

namespace tessera::ckpt {

struct TensorDifference {
  std::string name;
  std::string what = {};  // "only in the first", "types F32 and BF16", "shapes (4, 8) and (8, 4)"; empty: values
  int64_t elements = 0, differing = 0;
  double largest = 0;   // of the absolute differences
  double relative = 0;  // norm of the difference over that of the first
};
struct Diff {
  int64_t same = 0;                         // tensors, bit for bit
  std::vector<TensorDifference> different;  // by name; NaN differs from everything but the same bits
};

// `shared_only`: tensors that one of them lacks are no difference. Values of different types are compared too.
Diff diff(const Collection& a, const Collection& b, bool shared_only = false);

}  // namespace tessera::ckpt
