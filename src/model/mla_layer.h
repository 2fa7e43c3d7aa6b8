// The gated MLA token mixer: latent projections and norms, softmax attention inside documents, sigmoid output gate.
// Source: attention.md 9. Training and prefill use the expanded form, decode the absorbed one over the latent cache.
#pragma once

#include <vector>

#include "model/layer.h"
#include "ops/mla/op.h"
#include "ops/rms_norm/op.h"

namespace tessera::model::mla_layer {

struct Saved {
  View q_latent_in, q_latent;  // (T, r_q) before and after the norm; absent without a query latent
  ops::rms_norm::Saved q_norm;
  View q;      // (T, H (d_n + d_p))
  View kv_in;  // (T, r + d_p): latent before its norm, then the shared key
  View c;      // (T, r): latent after its norm
  ops::rms_norm::Saved c_norm;
  View keys;  // (Tk, r + d_p): c and shared key of all key rows, where tokens are cut among processes; else absent
  View kv;    // (Tk, H (d_n + d_v)); Tk = T but there
  ops::mla::Saved attention;
  View o, gate;  // (T, H d_v); gate absent without one
};

// Latent caches of N sequences.
struct Cache {
  std::vector<View> latent;     // N of (capacity, r + d_p)
  std::vector<int64_t> length;  // N: valid rows
};
Cache allocate_cache(Arena&, const ModelConfig&, int64_t sequences, int64_t capacity, DType);

Saved allocate_dear(const LayerContext&);
void allocate_cheap(const LayerContext&, Saved&);
// y (T, D) from x (T, D); y and dx are terms of a sum where heads are cut among processes (tensor_shard.h), and H is of
// the heads that are here. `max_logit` (H) may be absent. With a cache: the first call of a sequence may bring any
// number of tokens, later calls one token a sequence.
void forward(const LayerContext&, const MlaParams&, const View& x, const View& y, Saved&, const View& max_logit,
             Cache* cache);
void make_cheap(const LayerContext&, const MlaParams&, Saved&);  // from the dear part; same bits
void backward(const LayerContext&, const MlaParams&, const View& x, const Saved&, const View& dy, const View& dx);

}  // namespace tessera::model::mla_layer
