#include "optim/qk_clip.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "optim/cuda.h"

namespace tessera::optim {
namespace {

template <class Real>
void scale_rows(const View& matrix, int64_t begin, int64_t count, double factor) {
  for (int64_t r = begin; r < begin + count; ++r) {
    Real* row = matrix.as<Real>() + r * matrix.row_stride();
#pragma omp simd
    for (int64_t i = 0; i < matrix.dim(1); ++i) row[i] *= Real(factor);
  }
}

[[noreturn]] void fail_not_finite(size_t layer, int64_t head) {
  throw Error(fmt::format(
      "largest attention logit of head {}, layer {} of those to clip, is NaN or infinite: such a step must be skipped, "
      "not clipped",
      head, layer));
}

template <class Real>
int64_t clip_heads(const QkClip& d, size_t layer, const View& max_logit, const View& q_proj, const View& kv_b) {
  const Real* largest = max_logit.as<Real>();
  int64_t clipped = 0;
  for (int64_t h = 0; h < d.heads; ++h) {
    if (!(largest[h] < std::numeric_limits<Real>::infinity())) fail_not_finite(layer, h);
    clipped += double(largest[h]) > d.threshold;
  }
  if (clipped == 0) return 0;
  parallel_ranges(d.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      if (!(double(largest[h]) > d.threshold)) continue;
      const double gamma = d.threshold / double(largest[h]);
      const int64_t q_row = h * (d.nope_dim + d.rope_dim), kv_row = h * (d.nope_dim + d.value_dim);
      scale_rows<Real>(q_proj, q_row, d.nope_dim, std::sqrt(gamma));
      scale_rows<Real>(q_proj, q_row + d.nope_dim, d.rope_dim, gamma);
      scale_rows<Real>(kv_b, kv_row, d.nope_dim, std::sqrt(gamma));
    }
  });
  return clipped;
}

void check_layer(const QkClip& d, const QkClipLayer& l, DType dtype) {
  TESSERA_CHECK(l.q_proj.rank() == 2 && l.kv_b.rank() == 2, "QK-Clip wants matrices, found {} and {}",
                l.q_proj.shape().to_string(), l.kv_b.shape().to_string());
  check_view(l.max_logit, dtype, {d.heads}, "QK-Clip max_logit");
  check_strided_view(l.q_proj, dtype, {d.heads * (d.nope_dim + d.rope_dim), l.q_proj.dim(1)}, "QK-Clip q_proj");
  check_strided_view(l.kv_b, dtype, {d.heads * (d.nope_dim + d.value_dim), l.kv_b.dim(1)}, "QK-Clip kv_b");
  if (l.q_copy.present()) check_strided_view(l.q_copy, DType::bf16, l.q_proj.shape(), "QK-Clip copy of q_proj");
  if (l.kv_copy.present()) check_strided_view(l.kv_copy, DType::bf16, l.kv_b.shape(), "QK-Clip copy of kv_b");
}

int64_t clip_on_gpu(Context& ctx, const QkClip& d, std::span<const QkClipLayer> layers, const View& factors,
                    const View& outcomes) {
  for (size_t l = 0; l < layers.size(); ++l) {
    const int64_t row = static_cast<int64_t>(l);
    cuda::qk_clip(ctx.stream(), d, layers[l], factors.at(row), outcomes.at(row));
  }
  std::vector<int32_t> outcome(static_cast<size_t>(outcomes.elements()));
  copy(outcomes, View(outcome.data(), DType::i32, outcomes.shape()));
  int64_t clipped = 0;
  for (size_t i = 0; i < outcome.size(); ++i) {
    const size_t heads = static_cast<size_t>(d.heads);
    if (outcome[i] < 0) fail_not_finite(i / heads, static_cast<int64_t>(i % heads));
    clipped += outcome[i];
  }
  return clipped;
}

}  // namespace

Costs qk_clip_costs(const QkClip& d, std::span<const QkClipLayer> layers, Device back_end) {
  Costs sum;
  for (const QkClipLayer& l : layers) {
    const int64_t q = d.heads * (d.nope_dim + d.rope_dim) * l.q_proj.dim(1);
    const int64_t kv = d.heads * d.nope_dim * l.kv_b.dim(1);
    sum += {.vector_flops = q + kv,
            .bytes_moved = (2 * (q + kv) + d.heads) * bytes_of(l.q_proj.dtype()) + q * bytes_of(l.q_copy.dtype()) +
                           kv * bytes_of(l.kv_copy.dtype())};
  }
  if (back_end == Device::cuda) {
    const int64_t heads = static_cast<int64_t>(layers.size()) * d.heads;
    sum.workspace_bytes =
        Arena::aligned(2 * heads * bytes_of(DType::f32)) + Arena::aligned(heads * bytes_of(DType::i32));
  }
  return sum;
}

int64_t qk_clip(Context& ctx, const QkClip& d, std::span<const QkClipLayer> layers) {
  if (layers.empty()) return 0;
  const DType dtype = layers.front().q_proj.dtype();
  TESSERA_CHECK(d.threshold > 0, "QK-Clip threshold {}, wanted above 0", d.threshold);
  for (const QkClipLayer& l : layers) check_layer(d, l, dtype);
  OpScope op(ctx, "qk_clip", Pass::backward, qk_clip_costs(d, layers, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    const int64_t count = static_cast<int64_t>(layers.size());
    const View factors = ctx.arena.allocate(DType::f32, {count, d.heads, 2});
    const View outcomes = ctx.arena.allocate(DType::i32, {count, d.heads});
    return ctx.dry() ? 0 : clip_on_gpu(ctx, d, layers, factors, outcomes);
  }
  if (ctx.dry()) return 0;
  int64_t clipped = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    dispatch_real(dtype, [&](auto real) {
      clipped += clip_heads<decltype(real)>(d, l, layers[l].max_logit, layers[l].q_proj, layers[l].kv_b);
    });
  }
  return clipped;
}

}  // namespace tessera::optim
