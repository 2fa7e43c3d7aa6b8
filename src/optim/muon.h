// Muon: momentum, orthogonalised, as the update of a matrix. For every block W (a, b) of a slot, g the clipped
// gradient:
//   M  = mu M + g
//   G  = g + mu M  (Nesterov; else G = M)
//   X  = newton_schulz(G / (||G||_F + 1e-7))
//   W  = (1 - lr wd) W - lr 0.2 sqrt(max(a, b)) X
// X has rows or columns of length near 1, so the factor makes the RMS of the update 0.2, like AdamW's: one learning
// rate serves both. A block without gradient and momentum has X = 0: only the decay moves it. Source: moe.md 7.1, 7.2.
//
// On a CPU small blocks are shared out, each on one thread; larger ones take all threads one after another, so that the
// workspace stays that of a few matrices. The size alone decides, and the bits are the same either way. On the GPU
// blocks of one shape go together, and X is bf16: see batches.h.
#pragma once

#include "optim/optimizer.h"

namespace tessera::optim::muon {

inline constexpr int64_t kOwnThreadElements = 1 << 18;  // 512 x 512: 4 MiB of workspace a thread

// Of the slots with Rule::muon; others are passed over, as in step().
Costs costs(std::span<const Slot>, const Options&, Device back_end = Device::cpu);
void step(Context&, std::span<const Slot>, std::span<const Moments>, const Options&, double learning_rate,
          double gradient_scale);

}  // namespace tessera::optim::muon
