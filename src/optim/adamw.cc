#include "optim/adamw.h"

#include <cmath>

#include "core/parallel.h"
#include "optim/chunks.h"
#include "optim/cuda.h"

namespace tessera::optim::adamw {
namespace {

template <class Real>
Factors<Real> factors(const Options& o, double learning_rate, double gradient_scale, int64_t step) {
  // 1 - b^t by expm1: at t = 1 and b near 1 the plain difference would lose digits even in float64.
  const double t = static_cast<double>(step) + 1;
  const double unbias1 = o.beta1 > 0 ? -std::expm1(t * std::log(o.beta1)) : 1;
  const double unbias2 = o.beta2 > 0 ? -std::expm1(t * std::log(o.beta2)) : 1;
  return {.gradient_scale = Real(gradient_scale),
          .keep1 = Real(o.beta1),
          .add1 = Real(1 - o.beta1),
          .keep2 = Real(o.beta2),
          .add2 = Real(1 - o.beta2),
          .correction2 = Real(1 / std::sqrt(unbias2)),
          .epsilon = Real(o.epsilon),
          .rate = Real(learning_rate / unbias1)};
}

template <class Real>
void update(const Factors<Real>& f, Real keep, int64_t count, const Real* gradient, Real* w, Real* m, Real* v) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const Real g = f.gradient_scale * gradient[i];
    m[i] = f.keep1 * m[i] + f.add1 * g;
    v[i] = f.keep2 * v[i] + f.add2 * (g * g);
    w[i] = keep * w[i] - f.rate * m[i] / (std::sqrt(v[i]) * f.correction2 + f.epsilon);
  }
}

}  // namespace

Costs costs(std::span<const Slot> slots) {
  Costs sum;
  for (const Slot& s : slots) {
    if (s.rule != Rule::adamw) continue;
    // Read: value, gradient, m, v. Written: value, m, v, copy.
    sum += {.vector_flops = 14 * s.value.elements(), .bytes_moved = 7 * s.value.bytes() + s.copy.bytes()};
  }
  return sum;
}

void step(Context& ctx, std::span<const Slot> slots, std::span<const Moments> moments, const Options& options,
          double learning_rate, double gradient_scale, int64_t step) {
  const Chunks chunks(slots, Rule::adamw);
  if (chunks.count() == 0) return;
  OpScope op(ctx, "adamw", Pass::backward, costs(slots));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) {
    const Factors<float> f = factors<float>(options, learning_rate, gradient_scale, step);
    return cuda::adamw(ctx.stream(), slots, moments, f, learning_rate);
  }
  dispatch_real(slots.front().value.dtype(), [&](auto real) {
    using Real = decltype(real);
    const Factors<Real> f = factors<Real>(options, learning_rate, gradient_scale, step);
    parallel_ranges(chunks.count(), kChunkGrain, [&](int64_t from, int64_t to) {
      chunks.for_each(from, to, [&](int64_t, size_t slot, int64_t begin, int64_t end) {
        const Slot& s = slots[slot];
        update<Real>(f, Real(1 - learning_rate * s.weight_decay), end - begin, s.gradient.as<Real>() + begin,
                     s.value.as<Real>() + begin, moments[slot].first.as<Real>() + begin,
                     moments[slot].second.as<Real>() + begin);
      });
    });
  });
}

}  // namespace tessera::optim::adamw
