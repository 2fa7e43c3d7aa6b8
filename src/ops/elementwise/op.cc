// Bound by memory: one fused loop over each thread's range. On the CPU small enough to need no file of its own.
#include "ops/elementwise/op.h"

#include "core/parallel.h"
#include "ops/elementwise/cuda.h"

namespace tessera::ops::elementwise {
namespace {

constexpr int64_t kGrainElements = 1 << 15;  // below this a thread costs more than it saves

template <class Real>
void add_range(const Real* a, const Real* b, Real* y, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) y[i] = a[i] + b[i];
}

}  // namespace

Costs costs(int64_t elements, DType dtype) {
  return {.vector_flops = elements, .bytes_moved = 3 * elements * bytes_of(dtype)};
}

void add(Context& ctx, const View& a, const View& b, const View& y) {
  check_view(a, a.dtype(), a.shape(), "elementwise a");
  check_view(b, a.dtype(), a.shape(), "elementwise b");
  check_view(y, a.dtype(), a.shape(), "elementwise y");
  OpScope op(ctx, "elementwise", Pass::forward, costs(a.elements(), a.dtype()));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::add(ctx.stream(), a, b, y);
  dispatch_real(a.dtype(), [&](auto real) {
    using Real = decltype(real);
    parallel_ranges(a.elements(), kGrainElements, [&](int64_t begin, int64_t end) {
      add_range(a.as<Real>(), b.as<Real>(), y.as<Real>(), begin, end);
    });
  });
}

void add_to(Context& ctx, const View& a, const View& y) { add(ctx, a, y, y); }

void square_sums(Context& ctx, const View& x, const View& sums) {
  check_view(x, DType::f32, x.shape(), "square_sums x");
  check_view(sums, DType::f64, {sums.elements()}, "square_sums sums");
  OpScope op(ctx, "square_sums", Pass::forward, {.vector_flops = 2 * x.elements(), .bytes_moved = x.bytes()});
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::square_sums(ctx.stream(), x, sums);
  const int64_t parts = sums.elements(), length = parts > 0 ? x.elements() / parts : 0;
  parallel_items(parts, [&](int64_t part) {
    const float* values = x.as<float>() + part * length;
    double sum = 0;
    for (int64_t i = 0; i < length; ++i) sum += double(values[i]) * double(values[i]);
    sums.as<double>()[part] = sum;
  });
}

}  // namespace tessera::ops::elementwise
