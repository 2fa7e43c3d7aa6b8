// Checks, costs, the choice of back end, and the rows on the CPU.
#include "ops/router/z_loss.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "ops/router/cuda.h"
#include "ops/router/scores.h"

namespace tessera::ops::router::z_loss {
namespace {

constexpr int64_t kGrainElements = 1 << 12;  // logits; below this a thread costs more than it saves

template <class Real>
Real log_sum_exp(const RowScale<Real>& row) {
  return row.max - std::log(row.inverse_sum);
}

// Calls of_row(i, z) for every row with finite logits, and invalid(i) for the others.
template <class Real, class OfRow, class Invalid>
void for_rows(const Dims& d, const View& logits, OfRow&& of_row, Invalid&& invalid) {
  parallel_ranges(d.tokens, std::max<int64_t>(1, kGrainElements / d.experts), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Real* z = logits.as<Real>() + i * logits.row_stride();
      all_finite(z, d.experts) ? of_row(i, z) : invalid(i);
    }
  });
}

void check(const Dims& d, DType dtype, const View& logits) {
  TESSERA_CHECK(d.experts >= 1, "router z-loss of {} experts", d.experts);
  check_strided_view(logits, dtype, {d.tokens, d.experts}, "router z-loss logits");
}

}  // namespace

Costs costs(const Dims& d, DType dtype, Pass pass) {
  const int64_t n = d.tokens * d.experts, element = bytes_of(dtype);
  if (pass == Pass::forward) return {.vector_flops = 10 * n, .bytes_moved = (n + d.tokens) * element};
  return {.vector_flops = 20 * n, .bytes_moved = 3 * n * element};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = exact_type(in.logits.dtype());
  check(d, dtype, in.logits);
  check_view(out.loss, dtype, {d.tokens}, "router z-loss");
  OpScope op(ctx, "router_z_loss", Pass::forward, costs(d, dtype, Pass::forward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out);
  dispatch_real(dtype, [&](auto real) {
    using Real = decltype(real);
    Real* loss = out.loss.as<Real>();
    const auto of_row = [&](int64_t i, const Real* z) {
      const Real lse = log_sum_exp(softmax_scale(z, d.experts));
      loss[i] = lse * lse;
    };
    for_rows<Real>(d, in.logits, of_row, [&](int64_t i) { loss[i] = 0; });
  });
}

void backward(Context& ctx, const Dims& d, const Inputs& in, double scale, const Grads& grads) {
  const DType dtype = exact_type(in.logits.dtype());
  check(d, dtype, in.logits);
  check_strided_view(grads.logits, dtype, {d.tokens, d.experts}, "router z-loss dlogits");
  OpScope op(ctx, "router_z_loss", Pass::backward, costs(d, dtype, Pass::backward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::backward(ctx.stream(), d, in, scale, grads);
  dispatch_real(dtype, [&](auto real) {
    using Real = decltype(real);
    const auto of_row = [&](int64_t i, const Real* z) {
      const RowScale<Real> row = softmax_scale(z, d.experts);
      const Real pull = Real(2 * scale) * log_sum_exp(row);
      Real* dz = grads.logits.as<Real>() + i * grads.logits.row_stride();
#pragma omp simd
      for (int64_t j = 0; j < d.experts; ++j) dz[j] += pull * score_of<Score::softmax>(z[j], row);
    };
    for_rows<Real>(d, in.logits, of_row, [](int64_t) {});
  });
}

}  // namespace tessera::ops::router::z_loss
