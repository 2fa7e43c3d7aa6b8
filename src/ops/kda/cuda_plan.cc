// Sizes of the CUDA back end. Built without CUDA too: a dry run may stand for a GPU.
#include <algorithm>

#include "ops/kda/cuda.h"

namespace tessera::ops::kda::cuda {
namespace {

// Blocks of a scan that a document gives: two for each head of 128, one for narrower heads. With fewer than this a long
// document leaves three quarters of the GPU idle, and scanning its segments side by side, at 2.5 times the work, pays.
constexpr int64_t kFewBlocks = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f with type and shape of every view.
template <class F>
void for_each_view(const Dims& d, const Plan& p, Workspace& w, F&& f) {
  const int64_t h = d.value_heads, k = d.key_dim, v = d.value_dim;
  f(w.chunks, DType::i64, Shape{p.chunks, 2});
  f(w.pieces, DType::i64, Shape{p.pieces, 3});
  for (View* operand : {&w.k_start, &w.q_start, &w.k_end}) f(*operand, DType::bf16, Shape{p.chunks, h, kChunk, k});
  for (View* square : {&w.p, &w.inverse}) f(*square, DType::bf16, Shape{p.chunks, h, kChunk, kChunk});
  f(w.decay, DType::f32, Shape{p.chunks, h, k});
  f(w.beta, DType::f32, Shape{p.chunks, h, kChunk});
  if (!p.cut) return;
  f(w.ends, DType::f32, Shape{p.pieces, h, v, k});
  f(w.transitions, DType::f32, Shape{p.pieces, h, k, k});
}

}  // namespace

Plan plan(const Dims& d, const Documents& documents) {
  const int64_t blocks = d.value_heads * std::max<int64_t>(1, d.value_dim / 64);
  Plan p{.chunks = 0, .pieces = 0, .segment = blocks <= kFewBlocks ? kSegment : 0, .cut = false};
  for (int64_t n = 0; n < documents.count(); ++n) {
    const int64_t chunks = ceil_div(documents.length(n), kChunk);
    const bool cut = p.segment > 0 && chunks > 2 * p.segment;
    p.chunks += chunks;
    p.pieces += cut ? ceil_div(chunks, p.segment) : 1;
    p.cut = p.cut || cut;
  }
  return p;
}

int64_t workspace_bytes(const Dims& d, const Plan& p) {
  Workspace w;
  int64_t bytes = 0;
  for_each_view(d, p, w, [&](View&, DType dtype, const Shape& shape) {
    bytes += Arena::aligned(shape.elements() * bytes_of(dtype));
  });
  return bytes;
}

void check_fold(const View& state) {
  const int64_t k = state.dim(2);
  TESSERA_CHECK(state.dtype() == DType::f32 && state.dim(1) == k && (k == 32 || k == 64 || k == 128),
                "kda fold on the GPU of states {} of {}, wanted (HV, K, K) of f32 with K = 32, 64 or 128",
                state.shape().to_string(), name_of(state.dtype()));
}

Workspace allocate_workspace(Arena& arena, const Dims& d, const Plan& p) {
  Workspace w;
  for_each_view(d, p, w, [&](View& view, DType dtype, const Shape& shape) { view = arena.allocate(dtype, shape); });
  return w;
}

}  // namespace tessera::ops::kda::cuda
