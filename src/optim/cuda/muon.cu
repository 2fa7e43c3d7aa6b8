// Muon on the GPU, a batch of equal blocks at a time. See muon.h for the formulas.
//
//   M = mu M + g, sums of G^2, is g zero?   reads g and M, writes M: 12 bytes an element
//   X = G / ||G||, rounded to bf16          reads g and M again, writes X: 10; cheaper than keeping G in float32
//   Newton-Schulz on X by cuBLASLt, as in newton_schulz.h but with c1 X added by the last product: on the diagonal of a
//   bf16 B the constant 3.4445 would be rounded by up to 2^-8
//   W = (1 - lr wd) W - rate X              reads W and X, writes W and its copy: 12
//
// A matrix of 3072 x 3584 moves 0.4 GB in all, 0.08 ms at 4.8 TB/s, beside 0.97 TFLOP, 1 ms at 990 TFLOP/s.
#include <cmath>

#include "ops/gemm/cuda.h"
#include "optim/cuda/pieces.h"

namespace tessera::optim::cuda {
namespace {

constexpr float kC1 = 3.4445f, kC2 = -4.7750f, kC3 = 2.0315f;

// M = keep M + scale g,   G = direct g + through M
struct Momentum {
  float keep, scale, direct, through;
};

// Number of this chunk's block in the batch: all have the same chunks. X lies as the blocks follow one another.
__device__ int64_t block_in_batch(const Piece& p) {
  return blockIdx.x / ((p.elements + kChunkElements - 1) / kChunkElements);
}

__global__ void __launch_bounds__(kThreads)
    accumulate_kernel(const __grid_constant__ Pieces pieces, Momentum f, double* sums) {
  __shared__ double shared[kThreads / 32];
  const Chunk chunk = chunk_of(pieces, blockIdx.x);
  const Piece& p = pieces.piece[chunk.piece];
  double sum = 0;
  int busy = 0;
  for_eights(chunk, [&](int64_t i, int64_t left) {
    const int64_t at = chunk.begin + i;
    float g[8], m[8];
    load8(p.gradient + at, left, p.whole, g);
    load8(p.first + at, left, p.whole, m);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      busy |= g[j] != 0;
      m[j] = f.keep * m[j] + f.scale * g[j];
      const double value = f.direct * g[j] + f.through * m[j];
      sum += value * value;
    }
    store8(p.first + at, left, p.whole, m);
  });
  sum = block_sum(sum, shared);
  busy = __syncthreads_or(busy);
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = sum;
  sums[gridDim.x + blockIdx.x] = busy != 0;
}

__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const __grid_constant__ Pieces pieces, Momentum f, const double* squares, bf16* x) {
  const Chunk chunk = chunk_of(pieces, blockIdx.x);
  const Piece& p = pieces.piece[chunk.piece];
  const int64_t block = block_in_batch(p), place = block * p.elements + chunk.offset;
  const float factor = static_cast<float>(1 / (sqrt(squares[block]) + 1e-7));
  for_eights(chunk, [&](int64_t i, int64_t left) {
    float g[8], m[8];
    load8(p.gradient + chunk.begin + i, left, p.whole, g);
    load8(p.first + chunk.begin + i, left, p.whole, m);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] = factor * (f.direct * g[j] + f.through * m[j]);
    store8(x + place + i, left, p.whole, g);
  });
}

__global__ void __launch_bounds__(kThreads)
    apply_kernel(const __grid_constant__ Pieces pieces, float rate, const double* busy_chunks, const bf16* x) {
  const Chunk chunk = chunk_of(pieces, blockIdx.x);
  const Piece& p = pieces.piece[chunk.piece];
  const int64_t block = block_in_batch(p), place = block * p.elements + chunk.offset;
  const float keep = p.decay_idle || busy_chunks[block] > 0 ? p.keep : 1.0f;
  for_eights(chunk, [&](int64_t i, int64_t left) {
    const int64_t at = chunk.begin + i;
    float update[8], w[8];
    load8(x + place + i, left, p.whole, update);
    load8(p.value + at, left, p.whole, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = keep * w[j] - rate * update[j];
    store8(p.value + at, left, p.whole, w);
    if (p.copy != nullptr) store8(p.copy + at, left, p.whole, w);
  });
}

Pieces pieces_of(std::span<const Slot> slots, std::span<const Moments> moments, const Batch& batch,
                 double learning_rate) {
  Pieces pieces;
  const int64_t elements = batch.shape.elements();
  for (const Run& run : batch.runs) {
    const Slot& s = slots[run.slot];
    const int64_t begin = run.first * elements;
    Piece p{.gradient = s.gradient.gpu<float>() + begin,
            .value = s.value.gpu<float>() + begin,
            .first = moments[run.slot].first.gpu<float>() + begin,
            .copy = s.copy.present() ? s.copy.gpu<bf16>() + begin : nullptr,
            .elements = elements,
            .keep = static_cast<float>(1 - learning_rate * s.weight_decay),
            .decay_idle = s.decay_idle};
    p.whole = aligned(p.gradient) && aligned(p.value) && aligned(p.first) && aligned(p.copy) &&
              (batch.blocks == 1 || elements % 8 == 0);
    pieces.add(p, run.count);
  }
  return pieces;
}

// Returns x or next, whichever holds the result.
View newton_schulz(GpuStream stream, const Batch& batch, int64_t steps, const BatchWorkspace& w) {
  using ops::operand;
  const auto [rows, cols] = batch.shape;
  const bool transposed = rows > cols;
  const int64_t n = std::min(rows, cols), k = std::max(rows, cols), blocks = batch.blocks;
  const auto stack = [&](const View& memory, int64_t down, int64_t across) {
    return memory.row_range(0, blocks * down * across).reshaped({blocks, down, across});
  };
  View x = stack(w.x, rows, cols), next = stack(w.next, rows, cols);
  const View a = stack(w.a, n, n), b = stack(w.b, n, n);
  for (int64_t s = 0; s < steps; ++s) {
    // A = X X^T, or X^T X
    ops::gemm(stream,
              {.m = n,
               .n = n,
               .k = k,
               .trans_a = transposed ? ops::Trans::yes : ops::Trans::no,
               .trans_b = transposed ? ops::Trans::no : ops::Trans::yes,
               .a = operand(x),
               .b = operand(x),
               .c = operand(a),
               .batches = blocks},
              w.product);
    // B = c2 A + c3 A A
    ops::gemm(stream,
              {.m = n,
               .n = n,
               .k = n,
               .a = operand(a),
               .b = operand(a),
               .c = operand(a),
               .d = operand(b),
               .alpha = kC3,
               .beta = kC2,
               .batches = blocks},
              w.product);
    // X = c1 X + B X, or c1 X + X B
    ops::gemm(stream,
              {.m = rows,
               .n = cols,
               .k = n,
               .a = operand(transposed ? x : b),
               .b = operand(transposed ? b : x),
               .c = operand(x),
               .d = operand(next),
               .beta = kC1,
               .batches = blocks},
              w.product);
    std::swap(x, next);
  }
  return x;
}

}  // namespace

void muon(GpuStream stream, std::span<const Slot> slots, std::span<const Moments> moments, const Batch& batch,
          const Options& o, double learning_rate, double gradient_scale, const BatchWorkspace& w) {
  const Pieces pieces = pieces_of(slots, moments, batch, learning_rate);
  const float keep = static_cast<float>(o.momentum), scale = static_cast<float>(gradient_scale);
  const Momentum f{keep, scale, o.nesterov ? scale : 0.0f, o.nesterov ? keep : 1.0f};
  launch(accumulate_kernel, pieces.chunks, kThreads, 0, stream)(pieces, f, w.sums.gpu<double>());
  const int64_t chunks = chunks_of(batch.shape.elements());  // of a block
  double* squares = w.squares.gpu<double>();
  sum_rows(stream, w.sums.gpu<double>(), 2 * batch.blocks, chunks, squares);
  launch(normalise_kernel, pieces.chunks, kThreads, 0, stream)(pieces, f, squares, w.x.gpu<bf16>());
  const View update = newton_schulz(stream, batch, o.newton_schulz_steps, w);
  const double longest = static_cast<double>(std::max(batch.shape.rows, batch.shape.cols));
  launch(apply_kernel, pieces.chunks, kThreads, 0, stream)(
      pieces, static_cast<float>(learning_rate * 0.2 * std::sqrt(longest)), squares + batch.blocks, update.gpu<bf16>());
}

}  // namespace tessera::optim::cuda
