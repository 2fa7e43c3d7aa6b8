#include "optim/gradient_norm.h"

#include <cmath>

#include "core/parallel.h"
#include "optim/chunks.h"
#include "optim/cuda.h"

namespace tessera::optim {
namespace {

template <class Real>
double sum_of_squares(const Real* g, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += double(g[i]) * double(g[i]);
  return sum;
}

template <class Real>
void chunk_sums(std::span<const Slot> slots, const Chunks& chunks, double* sums) {
  parallel_ranges(chunks.count(), kChunkGrain, [&](int64_t from, int64_t to) {
    chunks.for_each(from, to, [&](int64_t chunk, size_t slot, int64_t begin, int64_t end) {
      sums[chunk] = sum_of_squares(slots[slot].gradient.as<Real>() + begin, end - begin);
    });
  });
}

int64_t sums_of(std::span<const Slot> slots, Device back_end) {
  return back_end == Device::cuda ? cuda::gradient_chunks(slots) + 1 : Chunks(slots).count();
}

double norm_on_gpu(Context& ctx, std::span<const Slot> slots, const View& sums) {
  const int64_t chunks = sums.rows() - 1;
  double total = 0;
  cuda::sum_of_squares(ctx.stream(), slots, sums.row_range(0, chunks), sums.row_range(chunks, 1));
  copy(sums.row_range(chunks, 1), View(&total, DType::f64, {1}));
  return std::sqrt(total);
}

}  // namespace

Costs gradient_norm_costs(std::span<const Slot> slots, Device back_end) {
  int64_t elements = 0, bytes = 0;
  for (const Slot& s : slots) {
    elements += s.gradient.elements();
    bytes += s.gradient.bytes();
  }
  return {.vector_flops = 2 * elements,
          .bytes_moved = bytes,
          .workspace_bytes = Arena::aligned(sums_of(slots, back_end) * bytes_of(DType::f64))};
}

double gradient_norm(Context& ctx, std::span<const Slot> slots) {
  OpScope op(ctx, "gradient_norm", Pass::backward, gradient_norm_costs(slots, ctx.back_end()));
  const View sums = ctx.arena.allocate(DType::f64, {sums_of(slots, ctx.back_end())});
  const Chunks chunks(slots);
  if (ctx.dry() || chunks.count() == 0) return 0;
  if (ctx.device == Device::cuda) return norm_on_gpu(ctx, slots, sums);
  dispatch_real(slots.front().gradient.dtype(),
                [&](auto real) { chunk_sums<decltype(real)>(slots, chunks, sums.as<double>()); });
  double sum = 0;
  for (int64_t c = 0; c < chunks.count(); ++c) sum += sums.as<double>()[c];
  return std::sqrt(sum);
}

}  // namespace tessera::optim
