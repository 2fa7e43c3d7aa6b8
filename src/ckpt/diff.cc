#include "ckpt/diff.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tessera::ckpt {
namespace {

bool is_float(const TensorInfo& t) {
  return t.stored == "F32" || t.stored == "F64" || t.stored == "BF16" || t.stored == "F16";
}

// Both of float types and one shape.
void compare_values(const std::vector<float>& a, const std::vector<float>& b, TensorDifference& d) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double apart = double(b[i]) - double(a[i]);
    norm += double(a[i]) * double(a[i]);
    if (std::memcmp(&a[i], &b[i], sizeof(float)) == 0) continue;
    ++d.differing;
    d.largest = std::isnan(apart) ? apart : std::max(d.largest, std::fabs(apart));
    error += apart * apart;
  }
  d.relative = error > 0 || std::isnan(error) ? std::sqrt(error / norm) : 0;
}

void compare_bytes(const Collection& a, const Collection& b, const TensorInfo& info, TensorDifference& d) {
  const std::byte *one = a.data(info.name), *other = b.data(info.name);
  const int64_t width = d.elements > 0 ? info.bytes / d.elements : 0;
  for (int64_t i = 0; i < d.elements; ++i) {
    d.differing += std::memcmp(one + i * width, other + i * width, static_cast<size_t>(width)) != 0;
  }
}

// True: the same bits.
bool compare(const Collection& a, const Collection& b, const std::string& name, TensorDifference& d) {
  const TensorInfo &one = a.at(name), &other = b.at(name);
  d.elements = 1;
  for (const int64_t extent : one.shape) d.elements *= extent;
  if (one.shape != other.shape) {
    d.what = fmt::format("shapes {} and {}", shape_text(one.shape), shape_text(other.shape));
    return false;
  }
  const bool same_type = one.stored == other.stored;
  if (same_type && std::memcmp(a.data(name), b.data(name), static_cast<size_t>(one.bytes)) == 0) return true;
  if (!same_type) d.what = fmt::format("types {} and {}", one.stored, other.stored);
  if (is_float(one) && is_float(other)) {
    compare_values(a.read_f32(name), b.read_f32(name), d);
  } else if (same_type) {
    compare_bytes(a, b, one, d);
  }
  return false;
}

}  // namespace

Diff diff(const Collection& a, const Collection& b, bool shared_only) {
  Diff result;
  const auto add_missing = [&](const Collection& here, const Collection& there, const char* what) {
    for (const std::string& name : here.names()) {
      if (there.find(name) == nullptr) result.different.push_back({.name = name, .what = what});
    }
  };
  if (!shared_only) {
    add_missing(a, b, "only in the first");
    add_missing(b, a, "only in the second");
  }
  for (const std::string& name : a.names()) {
    if (b.find(name) == nullptr) continue;
    TensorDifference d{.name = name};
    if (compare(a, b, name, d)) {
      ++result.same;
    } else {
      result.different.push_back(d);
    }
  }
  std::ranges::sort(result.different, {}, &TensorDifference::name);
  return result;
}

}  // namespace tessera::ckpt
