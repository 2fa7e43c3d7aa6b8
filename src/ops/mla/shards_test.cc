// Context parallelism without a communicator: a pack cut into shards, each with its own queries and the keys of their
// documents from the first on, against the pack in one go. Blocks of one prompt are the same with one document.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ops/check/check.h"
#include "ops/mla/op.h"

namespace tessera::ops::mla {
namespace {

using Values = std::vector<double>;
using check::relative_error;

struct Outcome {
  Values o, lse, dq, dkv, dk_shared;
};

template <class Real>
struct Pack {
  static constexpr DType kType = dtype_of<Real>;
  Dims d{0, 2, 24, 8, 20};
  std::vector<int64_t> offsets{0};
  Arena arena{int64_t{1} << 30};  // address space only
  Context ctx{Device::cpu, arena};
  View q, kv, k_shared, d_o;

  explicit Pack(const std::vector<int64_t>& lengths) {
    for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
    d.tokens = offsets.back();
    arena.set_poison(true);
    q = random("q", {d.tokens, d.heads, d.key_dim()});
    kv = random("kv", {d.tokens, d.heads, d.nope_dim + d.value_dim});
    k_shared = random("k_shared", {d.tokens, d.rope_dim});
    d_o = random("do", {d.tokens, d.heads, d.value_dim});
  }
  View random(const char* name, const std::vector<int64_t>& shape) {
    const check::Tensor t = check::random_tensor(name, shape);
    const View view = arena.allocate(kType, Shape(std::span<const int64_t>(shape)));
    std::copy(t.values.begin(), t.values.end(), view.template as<Real>());
    return view;
  }

  // What the rank with tokens [begin, end) adds to the whole.
  void run(int64_t begin, int64_t end, Outcome& to) {
    std::vector<int64_t> queries{0}, keys{0};
    int64_t key_begin = begin;
    for (size_t n = 0; n + 1 < offsets.size(); ++n) {
      const int64_t from = offsets[n], upto = std::min(offsets[n + 1], end);
      if (from >= end || offsets[n + 1] < begin) continue;  // one that ends at the cut has no query here
      if (queries.size() == 1) key_begin = from;
      queries.push_back(std::max(upto, begin) - begin);
      keys.push_back(upto - key_begin);
    }
    Arena::Scope scope(arena);
    Dims own = d;
    own.tokens = end - begin;
    const auto part = [&](const View& v) { return v.row_range(begin, own.tokens); };
    const auto key_part = [&](const View& v) { return v.row_range(key_begin, keys.back()); };
    const auto like = [&](const View& v) { return arena.allocate(kType, v.shape()); };
    const Inputs in{part(q), key_part(kv), key_part(k_shared), {queries}, {keys}};
    const Outputs out{like(part(d_o)), {}};
    const Grads grads{like(in.q), like(in.kv), like(in.k_shared)};
    Saved saved = allocate_saved(ctx, own, kType);
    forward(ctx, own, in, out, &saved);
    backward(ctx, own, in, out, saved, {part(d_o)}, grads);
    add(out.o, begin, to.o);
    add(saved.lse, begin, to.lse);
    add(grads.q, begin, to.dq);
    add(grads.kv, key_begin, to.dkv);
    add(grads.k_shared, key_begin, to.dk_shared);
  }
  static void add(const View& from, int64_t row, Values& to) {
    const int64_t at = row * from.row_elements();
    for (int64_t i = 0; i < from.elements(); ++i) to[size_t(at + i)] += from.template as<Real>()[i];
  }

  Outcome run(const std::vector<int64_t>& cuts) {
    const auto zeros = [](const View& v) { return Values(static_cast<size_t>(v.elements())); };
    Outcome r{zeros(d_o), Values(size_t(d.tokens * d.heads)), zeros(q), zeros(kv), zeros(k_shared)};
    for (size_t i = 0; i + 1 < cuts.size(); ++i) run(cuts[i], cuts[i + 1], r);
    return r;
  }
};

template <class Real>
void expect_whole(const std::vector<int64_t>& lengths, const std::vector<int64_t>& cuts, double limit) {
  Pack<Real> pack(lengths);
  const Outcome want = pack.run({0, pack.d.tokens}), got = pack.run(cuts);
  const std::string name = fmt::format("documents {} cut at {}", fmt::join(lengths, "+"), fmt::join(cuts, " "));
  EXPECT_LE(relative_error(got.o, want.o), limit) << name;
  EXPECT_LE(relative_error(got.lse, want.lse), limit) << name;
  EXPECT_LE(relative_error(got.dq, want.dq), limit) << name;
  EXPECT_LE(relative_error(got.dkv, want.dkv), limit) << name;
  EXPECT_LE(relative_error(got.dk_shared, want.dk_shared), limit) << name;
}

void expect_whole(const std::vector<int64_t>& lengths, const std::vector<int64_t>& cuts) {
  expect_whole<double>(lengths, cuts, 1e-12);
  expect_whole<float>(lengths, cuts, 1e-5);
}

TEST(MlaShards, EqualOneRank) {
  // Documents shorter than a block, an empty one at a cut, one over three ranks of which it fills one, a tail of one.
  const std::vector<int64_t> lengths{2, 90, 3, 0, 640, 60, 0, 1};
  const int64_t total = 796;
  expect_whole(lengths, {0, 95, total});
  expect_whole(lengths, {0, 400, total});
  expect_whole(lengths, {0, 200, 500, total});
  expect_whole(lengths, {0, 94, 110, 700, total});
  expect_whole(lengths, {0, 1, 2, 795, total});
  expect_whole(lengths, {0, 300, 300, total});
}

TEST(MlaShards, BlocksOfOnePrompt) {
  expect_whole({1300}, {0, 256, 512, 768, 1300});
  expect_whole({1300}, {0, 1, 130, 1299, 1300});
}

TEST(MlaShards, FlopsCountThePairsOfThePrefix) {
  const Dims d{5, 2, 4, 2, 3};
  const std::vector<int64_t> offsets{0, 3, 5}, keys{0, 10, 12};
  const int64_t pairs = 2 * (3 * 7 + 6 + 3);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int64_t each = pass == Pass::forward ? 2 * 6 + 2 * 3 : 3 * 2 * 6 + 2 * 2 * 3;
    EXPECT_EQ(costs(d, {offsets}, DType::f32, pass, Device::cpu, {keys}).gemm_flops, pairs * each);
  }
}

TEST(MlaShards, FewerKeysThanQueriesAndOtherDocumentsAreRefused) {
  Pack<double> pack({6, 4});
  const std::vector<int64_t> queries{0, 6, 10};
  const auto run = [&](std::vector<int64_t> keys) {
    const View o = pack.arena.allocate(DType::f64, pack.d_o.shape());
    const View kv = pack.kv.row_range(0, keys.back()), k_shared = pack.k_shared.row_range(0, keys.back());
    forward(pack.ctx, pack.d, {pack.q, kv, k_shared, {queries}, {keys}}, {o, {}}, nullptr);
  };
  EXPECT_NO_THROW(run({0, 6, 10}));
  EXPECT_THROW(run({0, 5, 10}), Error);
  EXPECT_THROW(run({0, 10}), Error);
  EXPECT_THROW(run({0, 6, 9}), Error);
}

}  // namespace
}  // namespace tessera::ops::mla
