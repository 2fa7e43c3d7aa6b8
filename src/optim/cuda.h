// The optimiser on the GPU: float32 masters, momenta and gradients; working copies in bf16. Launchers, see op contract.
#pragma once

#include "optim/adamw.h"
#include "optim/batches.h"
#include "optim/chunks.h"
#include "optim/qk_clip.h"

namespace tessera::optim::cuda {

// Chunks of all gradients, each slot cut by itself.
inline int64_t gradient_chunks(std::span<const Slot> slots) {
  int64_t chunks = 0;
  for (const Slot& s : slots) chunks += chunks_of(s.gradient.elements());
  return chunks;
}

// sums (gradient_chunks) and total (1), float64: sums of squares.
void sum_of_squares(GpuStream, std::span<const Slot>, const View& sums, const View& total);

void adamw(GpuStream, std::span<const Slot>, std::span<const Moments>, const adamw::Factors<float>&,
           double learning_rate);

void muon(GpuStream, std::span<const Slot>, std::span<const Moments>, const Batch&, const Options&,
          double learning_rate, double gradient_scale, const BatchWorkspace&);

// factors (H, 2) f32 of the nope and the rope rows; outcome (H) i32: 1 where the head was clipped, -1 where its largest
// logit is NaN or +inf, and then no head of the layer is scaled.
void qk_clip(GpuStream, const QkClip&, const QkClipLayer&, const View& factors, const View& outcome);

}  // namespace tessera::optim::cuda
