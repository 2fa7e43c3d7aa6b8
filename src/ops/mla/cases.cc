#include "ops/mla/cases.h"

#include <fmt/format.h>

#include "ops/mla/op.h"
#include "ops/mla/reference.h"

namespace tessera::ops::mla {
namespace {

using check::GradientRule;
using check::Tensor;

constexpr double kMaxLogitBefore = 0.5;  // of QK-clip's maximum: the op raises it

struct HeadShape {
  int64_t heads, nope_dim, rope_dim, value_dim;
};

Dims dims_of(const HeadShape& s, const std::vector<int64_t>& offsets) {
  return {offsets.back(), s.heads, s.nope_dim, s.rope_dim, s.value_dim};
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> offsets{0};
  for (int64_t length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

// `keys` empty: those of the queries' tokens.
void run(const Dims& d, const std::vector<int64_t>& offsets, const std::vector<int64_t>& keys, const check::Run& r) {
  const bool backward_too = !r.d_outputs.empty();
  Saved saved;
  if (backward_too) saved = allocate_saved(r.context, d, r.inputs[0].dtype());
  const Inputs in{r.inputs[0], r.inputs[1], r.inputs[2], place_documents(r.context, offsets),
                  keys.empty() ? Documents{} : place_documents(r.context, keys)};
  Outputs out{r.outputs[0], {}};
  if (r.outputs.size() > 1) {
    out.max_logit = r.outputs[1];
    dispatch_real(out.max_logit.dtype(), [&](auto real) {
      std::vector<decltype(real)> before(size_t(d.heads), decltype(real)(kMaxLogitBefore));
      copy(View(before.data(), out.max_logit.dtype(), {d.heads}), out.max_logit);
    });
  }
  forward(r.context, d, in, out, backward_too ? &saved : nullptr);
  if (!backward_too) return;
  backward(r.context, d, in, out, saved, {r.d_outputs[0]}, {r.d_inputs[0], r.d_inputs[1], r.d_inputs[2]});
}

std::vector<Tensor> inputs(const Dims& d, int64_t keys, double scale) {
  return {check::random_tensor("q", {d.tokens, d.heads, d.nope_dim + d.rope_dim}, scale),
          check::random_tensor("kv", {keys, d.heads, d.nope_dim + d.value_dim}),
          check::random_tensor("k_shared", {keys, d.rope_dim})};
}

std::vector<Tensor> definition(const Dims& d, const std::vector<int64_t>& offsets, const std::vector<int64_t>& keys,
                               const std::vector<Tensor>& in) {
  const reference::Problem p{d.tokens, d.heads, d.nope_dim, d.rope_dim, d.value_dim, d.logit_scale(), offsets, keys};
  auto result = reference::forward(p, in[0].values, in[1].values, in[2].values,
                                   std::vector<double>(size_t(d.heads), kMaxLogitBefore));
  return {{"o", {d.tokens, d.heads, d.value_dim}, std::move(result.o)},
          {.name = "max_logit",
           .shape = {d.heads},
           .values = std::move(result.max_logit),
           .gradient = GradientRule::none,
           .exact = true}};
}

check::Case make_case(HeadShape s, const std::vector<int64_t>& lengths, double q_scale = 1.0, double scale = 0) {
  const std::vector<int64_t> offsets = offsets_of(lengths);
  Dims d = dims_of(s, offsets);
  d.scale = scale;
  return {.name = fmt::format("documents {} H {} {}/{}/{} q x{} scale {}", fmt::join(lengths, "+"), d.heads, d.nope_dim,
                              d.rope_dim, d.value_dim, q_scale, scale),
          .inputs = [=] { return inputs(d, d.tokens, q_scale); },
          .reference = [=](const std::vector<Tensor>& in) { return definition(d, offsets, {}, in); },
          .run = [=](const check::Run& r) { run(d, offsets, {}, r); },
          // In bf16 the gradients of q and k carry the rounding of o, which stands in delta against dP: where one key
          // has nearly all the weight, or there are few keys at all, little else is left of them.
          .limit_bf16_gradient = q_scale > 1 || d.tokens < 16 ? 2e-2 : 6e-3};
}

// Of each document the last `queries` of `keys` positions.
check::Case make_prefix(HeadShape s, const std::vector<int64_t>& queries, const std::vector<int64_t>& keys) {
  check::Case c = make_case(s, queries);
  const std::vector<int64_t> offsets = offsets_of(queries), key_offsets = offsets_of(keys);
  const Dims d = dims_of(s, offsets);
  c.name += fmt::format(" of {}", fmt::join(keys, "+"));
  c.inputs = [=] { return inputs(d, key_offsets.back(), 1.0); };
  c.reference = [=](const std::vector<Tensor>& in) { return definition(d, offsets, key_offsets, in); };
  c.run = [=](const check::Run& r) { run(d, offsets, key_offsets, r); };
  return c;
}

// One query for each cache, of the lengths given.
check::Case make_decode(HeadShape s, int64_t rank, const std::vector<int64_t>& lengths) {
  const std::vector<int64_t> offsets = offsets_of(lengths);
  Dims d = dims_of(s, offsets);
  const int64_t keys = d.tokens, up = d.heads * (d.nope_dim + d.value_dim);
  d.tokens = static_cast<int64_t>(lengths.size());
  const Tensor q = check::random_tensor("q", {d.tokens, d.heads, d.key_dim()}, 1.0, GradientRule::none);
  const Tensor kv_b = check::random_tensor("kv_b", {up, rank}, 1 / std::sqrt(double(rank)), GradientRule::none);
  const Tensor latent = check::random_tensor("latent", {keys, rank + d.rope_dim}, 1.0, GradientRule::none);
  return {.name = fmt::format("decode caches {} H {} {}/{}/{} rank {}", fmt::join(lengths, "+"), d.heads, d.nope_dim,
                              d.rope_dim, d.value_dim, rank),
          .inputs =
              [=] {
                return std::vector<Tensor>{q, kv_b, latent};
              },
          .reference =
              [=](const std::vector<Tensor>& in) {
                const reference::Problem p{d.tokens,    d.heads,         d.nope_dim, d.rope_dim,
                                           d.value_dim, d.logit_scale(), offsets};
                return std::vector<Tensor>{{"o",
                                            {d.tokens, d.heads, d.value_dim},
                                            reference::decode(p, rank, in[0].values, in[1].values, in[2].values)}};
              },
          .run =
              [=](const check::Run& r) {
                DecodeInputs in{r.inputs[0], r.inputs[1], {}};
                for (size_t n = 0; n < lengths.size(); ++n) {
                  in.latent.push_back(r.inputs[2].row_range(offsets[n], lengths[n]));
                }
                decode(r.context, d, in, r.outputs[0]);
              },
          .limit_bf16 = 4e-3};  // the absorbed query is rounded too
}

check::SpeedCase make_speed(HeadShape s, int64_t documents, int64_t length) {
  constexpr int64_t kPeriod = 1000003;  // values of a tensor: its size may be more than a host should draw
  const std::vector<int64_t> offsets = offsets_of(std::vector<int64_t>(size_t(documents), length));
  const Dims d = dims_of(s, offsets);
  return {
      .name = fmt::format("T {} of {} H {} {}/{}/{}", d.tokens, length, d.heads, d.nope_dim, d.rope_dim, d.value_dim),
      .inputs =
          [=] {
            return std::vector<Tensor>{
                check::periodic_tensor("q", {d.tokens, d.heads, d.key_dim()}, kPeriod),
                check::periodic_tensor("kv", {d.tokens, d.heads, d.nope_dim + d.value_dim}, kPeriod),
                check::periodic_tensor("k_shared", {d.tokens, d.rope_dim}, kPeriod)};
          },
      .output_shapes = {{d.tokens, d.heads, d.value_dim}},
      .run = [=](const check::Run& r) { run(d, offsets, {}, r); }};
}

}  // namespace

const check::OpTable& table() {
  // Lengths around the register (16), diagonal (64), key (128) and query (256) blocks;
  // the last document of 3+640+500 lies in two groups of keys. 8/8/3: rows of all heads are whole vectors on a GPU,
  // one head's values are not.
  static const check::OpTable t{
      .op = "mla",
      .cases = {make_case({2, 4, 2, 3}, {0}), make_case({2, 4, 2, 3}, {1}), make_case({1, 3, 1, 2}, {2}),
                make_case({2, 4, 2, 3}, {0, 1, 15, 0, 16, 17, 1}), make_case({3, 5, 3, 7}, {63, 1, 64, 65}),
                make_case({1, 8, 4, 8}, {127, 128, 129, 1}), make_case({2, 3, 1, 1}, {1, 1, 1, 1, 1}),
                make_case({1, 4, 2, 4}, {255, 0, 257}), make_case({1, 4, 0, 4}, {40}), make_case({1, 0, 4, 4}, {40}),
                make_case({2, 2, 2, 2}, {30}, 1.0, 0.7), make_case({2, 8, 4, 4}, {70}, 10.0),
                make_case({1, 2, 1, 2}, {3, 640, 500}), make_case({8, 8, 8, 3}, {33}),
                // Prefixes as long as, next to and beside the blocks; no queries at all, none in a document.
                make_prefix({2, 4, 2, 3}, {0}, {5}), make_prefix({2, 4, 2, 3}, {1}, {2}),
                make_prefix({2, 4, 2, 3}, {0, 1, 16, 0, 3}, {7, 64, 17, 0, 130}),
                make_prefix({1, 8, 4, 8}, {5, 70, 20, 9}, {5, 198, 149, 9}),
                make_prefix({2, 3, 1, 1}, {257, 1, 300}, {400, 640, 301}), make_prefix({8, 8, 8, 3}, {33}, {97}),
                make_decode({2, 4, 2, 3}, 5, {1}), make_decode({3, 5, 3, 7}, 24, {7, 1, 33, 64}),
                make_decode({17, 4, 8, 8}, 16, {300, 5})},
      .speed = {make_speed({8, 128, 64, 128}, 1, 2048), make_speed({4, 32, 16, 32}, 8, 1024)},
      .more = more_checks,
      .cuda_types = {DType::bf16},
      // Heads of 128 + 64 / 128 over several blocks, the last of one token or nearly full, more heads than are at work
      // at once, documents around a tile of queries (64) and a block of keys (128); the middle tiles; sharp softmax.
      // Decode: rows read eight at a time, heads in groups of 16, 32 and 64, more than 64 sequences.
      .cuda_cases = {make_case({3, 128, 64, 128}, {700, 1, 333}), make_case({2, 128, 64, 128}, {129, 255, 64, 1025}),
                     make_case({5, 128, 64, 128}, {1, 63, 65, 127, 192, 2, 0, 3}),
                     make_case({2, 64, 32, 64}, {200, 130}), make_case({1, 24, 16, 24}, {500}, 4.0),
                     make_prefix({3, 128, 64, 128}, {100, 0, 1, 333, 64}, {700, 40, 500, 333, 129}),
                     make_prefix({2, 128, 64, 128}, {300, 129, 128}, {1324, 130, 1000}),
                     make_prefix({2, 64, 32, 64}, {200, 0, 17}, {500, 300, 217}),
                     make_prefix({1, 24, 16, 24}, {0, 0}, {100, 3}), make_decode({16, 128, 64, 128}, 512, {1, 600, 31}),
                     make_decode({24, 32, 16, 32}, 64, {257, 700}), make_decode({70, 16, 8, 16}, 40, {290}),
                     make_decode({2, 8, 8, 8}, 16, std::vector<int64_t>(70, 40))},
      .cuda_speed = {make_speed({16, 128, 64, 128}, 1, 32768), make_speed({16, 128, 64, 128}, 8, 4096)}};
  return t;
}

}  // namespace tessera::ops::mla
