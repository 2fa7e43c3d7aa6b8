// AdamW, one pass: gradient, value and both moments are read (16 bytes an element), value, moments and the rounded copy
// written (12, and 2 where there is a copy).
#include "optim/cuda/pieces.h"

namespace tessera::optim::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ Pieces pieces, adamw::Factors<float> f) {
  const Chunk chunk = chunk_of(pieces, blockIdx.x);
  const Piece& p = pieces.piece[chunk.piece];
  for_eights(chunk, [&](int64_t i, int64_t left) {
    const int64_t at = chunk.begin + i;
    float g[8], w[8], m[8], v[8];
    load8(p.gradient + at, left, p.whole, g);
    load8(p.value + at, left, p.whole, w);
    load8(p.first + at, left, p.whole, m);
    load8(p.second + at, left, p.whole, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scaled = f.gradient_scale * g[j];
      m[j] = f.keep1 * m[j] + f.add1 * scaled;
      v[j] = f.keep2 * v[j] + f.add2 * (scaled * scaled);
      w[j] = p.keep * w[j] - f.rate * m[j] / (sqrtf(v[j]) * f.correction2 + f.epsilon);
    }
    store8(p.first + at, left, p.whole, m);
    store8(p.second + at, left, p.whole, v);
    store8(p.value + at, left, p.whole, w);
    if (p.copy != nullptr) store8(p.copy + at, left, p.whole, w);
  });
}

Piece piece_of(const Slot& s, const Moments& moments, double learning_rate) {
  Piece p{.gradient = s.gradient.gpu<float>(),
          .value = s.value.gpu<float>(),
          .first = moments.first.gpu<float>(),
          .second = moments.second.gpu<float>(),
          .copy = s.copy.present() ? s.copy.gpu<bf16>() : nullptr,
          .elements = s.value.elements(),
          .keep = static_cast<float>(1 - learning_rate * s.weight_decay)};
  p.whole = aligned(p.gradient) && aligned(p.value) && aligned(p.first) && aligned(p.second) && aligned(p.copy);
  return p;
}

}  // namespace

void adamw(GpuStream stream, std::span<const Slot> slots, std::span<const Moments> moments,
           const adamw::Factors<float>& factors, double learning_rate) {
  Pieces pieces;
  const auto run = [&] {
    launch(adamw_kernel, pieces.chunks, kThreads, 0, stream)(pieces, factors);
    pieces = {};
  };
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].rule != Rule::adamw || slots[i].value.elements() == 0) continue;
    pieces.add(piece_of(slots[i], moments[i], learning_rate), 1);
    if (pieces.count == kPieces) run();
  }
  run();
}

}  // namespace tessera::optim::cuda
