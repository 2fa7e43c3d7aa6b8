#include "optim/qk_clip.h"

#include <cmath>
#include <limits>

#include "core/parallel.h"

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

template <class Real>
int64_t clip_heads(const QkClip& d, const View& max_logit, const View& q_proj, const View& kv_b) {
  const Real* largest = max_logit.as<Real>();
  int64_t clipped = 0;
  for (int64_t h = 0; h < d.heads; ++h) {
    TESSERA_CHECK(largest[h] < std::numeric_limits<Real>::infinity(),
                  "largest attention logit of head {} is {}: such a step must be skipped, not clipped", h, largest[h]);
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

}  // namespace

Costs qk_clip_costs(const QkClip& d, DType dtype, int64_t q_inputs, int64_t kv_inputs) {
  const int64_t scaled = d.heads * ((d.nope_dim + d.rope_dim) * q_inputs + d.nope_dim * kv_inputs);
  return {.vector_flops = scaled, .bytes_moved = (2 * scaled + d.heads) * bytes_of(dtype)};
}

int64_t qk_clip(Context& ctx, const QkClip& d, const View& max_logit, const View& q_proj, const View& kv_b) {
  const DType dtype = q_proj.dtype();
  TESSERA_CHECK(d.threshold > 0, "QK-Clip threshold {}, wanted above 0", d.threshold);
  TESSERA_CHECK(q_proj.rank() == 2 && kv_b.rank() == 2, "QK-Clip wants matrices, found {} and {}",
                q_proj.shape().to_string(), kv_b.shape().to_string());
  check_view(max_logit, dtype, {d.heads}, "QK-Clip max_logit");
  check_strided_view(q_proj, dtype, {d.heads * (d.nope_dim + d.rope_dim), q_proj.dim(1)}, "QK-Clip q_proj");
  check_strided_view(kv_b, dtype, {d.heads * (d.nope_dim + d.value_dim), kv_b.dim(1)}, "QK-Clip kv_b");
  OpScope op(ctx, "qk_clip", Pass::backward, qk_clip_costs(d, dtype, q_proj.dim(1), kv_b.dim(1)));
  if (ctx.dry()) return 0;
  int64_t clipped = 0;
  dispatch_real(dtype, [&](auto real) { clipped = clip_heads<decltype(real)>(d, max_logit, q_proj, kv_b); });
  return clipped;
}

}  // namespace tessera::optim
