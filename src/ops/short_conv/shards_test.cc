// Context parallelism without a communicator: a pack cut into shards against the pack in one go. What crosses a cut is
// the window of the document that does: the last W-1 inputs of it on the left, zeros where it has fewer; the gradient
// of these rows goes back to the inputs on the left. A shard must have W-1 tokens, or a window would come from two of
// them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ops/check/check.h"
#include "ops/short_conv/op.h"

namespace tessera::ops::short_conv {
namespace {

using Values = std::vector<double>;

struct Outcome {
  Values y, dx, d_weight;
};

template <class Real>
struct Pack {
  static constexpr DType kType = dtype_of<Real>;
  Dims d{0, 20, 4};
  std::vector<int64_t> offsets{0};
  Arena arena{int64_t{1} << 28};
  Context ctx{Device::cpu, arena};
  View x, weight, dy, y, dx, d_weight;

  Pack(const std::vector<int64_t>& lengths, int64_t width) {
    for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
    d.tokens = offsets.back();
    d.width = width;
    arena.set_poison(true);
    x = random("x", {d.tokens, d.channels});
    weight = random("weight", {d.channels, d.width});
    dy = random("dy", {d.tokens, d.channels});
  }
  View random(const char* name, const std::vector<int64_t>& shape) {
    const check::Tensor t = check::random_tensor(name, shape);
    const View view = arena.allocate(kType, Shape(std::span<const int64_t>(shape)));
    std::copy(t.values.begin(), t.values.end(), view.template as<Real>());
    return view;
  }

  void run(int64_t begin, int64_t end) {
    std::vector<int64_t> local{0};
    int64_t halo = 0;  // valid rows of the first document's window
    for (size_t n = 0; n + 1 < offsets.size(); ++n) {
      const int64_t from = offsets[n], to = offsets[n + 1];
      if (from >= end || to <= begin) continue;
      if (local.size() == 1) halo = std::clamp<int64_t>(begin - from, 0, d.width - 1);
      local.push_back(std::min(to, end) - begin);
    }
    Arena::Scope scope(arena);
    const auto part = [&](const View& v) { return v.row_range(begin, end - begin); };
    const Shape first{1, d.width - 1, d.channels};
    const View window = arena.allocate_zeroed(kType, first), d_window = arena.allocate(kType, first);
    const auto valid = [&](const View& w) { return w.at(0).row_range(d.width - 1 - halo, halo); };
    copy(x.row_range(begin - halo, halo), valid(window));
    Dims own = d;
    own.tokens = end - begin;
    const Inputs in{part(x), weight, window, {local}};
    forward(ctx, own, in, {part(y), {}});
    backward(ctx, own, in, {part(dy)}, {part(dx), d_weight, d_window});
    const View to = dx.row_range(begin - halo, halo), from = valid(d_window);
    for (int64_t i = 0; i < to.elements(); ++i) to.template as<Real>()[i] += from.template as<Real>()[i];
  }

  Outcome run(const std::vector<int64_t>& cuts) {
    y = arena.allocate(kType, x.shape()), dx = arena.allocate(kType, x.shape());
    d_weight = arena.allocate_zeroed(kType, weight.shape());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) run(cuts[i], cuts[i + 1]);
    const auto values = [](const View& v) { return Values(v.as<Real>(), v.as<Real>() + v.elements()); };
    return {values(y), values(dx), values(d_weight)};
  }
};

template <class Real>
void expect_whole(const std::vector<int64_t>& lengths, int64_t width, const std::vector<int64_t>& cuts, double limit) {
  Pack<Real> pack(lengths, width);
  const Outcome want = pack.run({0, pack.d.tokens}), got = pack.run(cuts);
  const std::string name = fmt::format("{} cut at {}, W {}", fmt::join(lengths, "+"), fmt::join(cuts, " "), width);
  EXPECT_LE(check::relative_error(got.y, want.y), limit) << name;
  EXPECT_LE(check::relative_error(got.dx, want.dx), limit) << name;
  EXPECT_LE(check::relative_error(got.d_weight, want.d_weight), limit) << name;
}

TEST(ShortConvShards, EqualOneRank) {
  // Documents shorter than the window, an empty one at a cut, one over three ranks, a tail of one token. Cuts one, two
  // and three tokens into a document, and as many before its end.
  const std::vector<int64_t> lengths{2, 20, 3, 0, 30, 1, 1, 5, 0, 1};
  for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{{0, 25, 63},
                                                                            {0, 23, 63},
                                                                            {0, 24, 28, 63},
                                                                            {0, 26, 29, 33, 63},
                                                                            {0, 3, 54, 63},
                                                                            {0, 5, 52, 57, 63},
                                                                            {0, 4, 35, 59, 63}}) {
    expect_whole<double>(lengths, 4, cuts, 1e-12);
    expect_whole<float>(lengths, 4, cuts, 1e-5);
  }
  expect_whole<double>(lengths, 2, {0, 1, 2, 3, 63}, 1e-12);
  expect_whole<double>(lengths, 1, {0, 1, 30, 63}, 1e-12);
}

}  // namespace
}  // namespace tessera::ops::short_conv
