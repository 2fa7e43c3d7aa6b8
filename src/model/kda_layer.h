// The KDA token mixer: projections, short convolutions, L2 norm, decay gate, delta rule, gated output norm.
// Source: attention.md 1.
#pragma once

#include "model/layer.h"
#include "ops/kda/op.h"
#include "ops/l2_norm/op.h"
#include "ops/rms_norm/op.h"

namespace tessera::model::kda_layer {

struct Saved {            // G = H K, R = gate rank
  View q_in, k_in, v_in;  // (T, G): before the convolutions
  View q, k, v;           // (T, G): after convolution and norm
  ops::l2_norm::Saved q_norm, k_norm;
  View decay_latent, z;    // (T, R), (T, G)
  View beta_logit;         // (T, H)
  View gate_latent, gate;  // (T, R) with a low-rank output gate; (T, G)
  ops::kda::Saved kda;
  // Where a document crosses from process to process (kda_context.h), else absent:
  View q_window, k_window, v_window;  // (N, W-1, G)
  View initial_state, transition;     // (1, H, V, K), (H, K, K)
  View o;                             // (T, G)
  ops::rms_norm::Saved o_norm;
};

// What a sequence carries from call to call: constant in its length.
struct Cache {
  View q_window, k_window, v_window;  // (N, W-1, G)
  View state;                         // (N, H, V, K)
};
Cache allocate_cache(Arena&, const ModelConfig&, int64_t sequences, DType);

Saved allocate_dear(const LayerContext&, bool training);
void allocate_cheap(const LayerContext&, Saved&);
// y (T, D) from x (T, D); y and dx are terms of a sum where heads are cut among processes (tensor_shard.h). H is of the
// heads that are here. With a cache: continues its sequences, one document each, and updates it.
void forward(const LayerContext&, const KdaParams&, const View& x, const View& y, Saved&, bool training, Cache* cache);
void make_cheap(const LayerContext&, const KdaParams&, Saved&, Cache* cache);  // from the dear part; same bits
void backward(const LayerContext&, const KdaParams&, const View& x, const Saved&, const View& dy, const View& dx);

}  // namespace tessera::model::kda_layer
