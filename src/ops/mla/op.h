// Multi-head latent attention without positions (NoPE): causal softmax attention inside each packed document.
//
//   k_h = [kn_h | kp],  kp shared by all heads;   o_h = softmax(scale q_h k_h^T + causal mask) v_h
//
// A document's queries may be the last of its positions alone: a rank's part of it, or a block of a long prompt. Its
// keys then have their own rows, those of all positions up to its last query.
//
// Expanded form for training and prefill (this op's forward and backward); absorbed form over the latent cache for
// decode. The projections around it, the latent norm and the output gate belong to the layer.
// Source: attention.md 9. Logits never exist as a (T, T) matrix: blocks with a running maximum and sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/context.h"
#include "core/documents.h"

namespace tessera::ops::mla {

struct Dims {
  int64_t tokens, heads;                  // T (queries), H
  int64_t nope_dim, rope_dim, value_dim;  // d_n, d_p, d_v
  double scale = 0;                       // 0: (d_n + d_p)^(-1/2)

  int64_t key_dim() const { return nope_dim + rope_dim; }
  double logit_scale() const { return scale != 0 ? scale : 1 / std::sqrt(double(std::max<int64_t>(key_dim(), 1))); }
};
struct Inputs {
  View q;                        // (T, H, d_n + d_p)
  View kv;                       // (Tk, H, d_n + d_v): per head key rows, then value rows
  View k_shared;                 // (Tk, d_p), any row stride: the last columns of the latent projection
  Documents documents;           // of the queries
  Documents key_documents = {};  // the same documents of Tk keys, none shorter; absent: `documents`, Tk = T
};
struct Outputs {
  View o;          // (T, H, d_v)
  View max_logit;  // (H), exact_type: raised to the largest scaled logit seen (QK-clip); absent: not wanted
};
struct Saved {
  View lse;  // (T, H), exact_type: log-sum-exp of the scaled logits
};
struct OutputGrads {
  View o;  // (T, H, d_v)
};
struct Grads {
  View q, kv;     // shapes of the inputs; overwritten
  View k_shared;  // (Tk, d_p), any row stride; overwritten
};

Costs costs(const Dims&, const Documents&, DType, Pass, Device back_end = Device::cpu, const Documents& keys = {});
Saved allocate_saved(Context&, const Dims&, DType);

void forward(Context&, const Dims&, const Inputs&, const Outputs&, Saved*);  // Saved null: inference
void backward(Context&, const Dims&, const Inputs&, const Outputs&, const Saved&, const OutputGrads&, const Grads&);

// Decode with W_kvb absorbed: one query token for each of N sequences over its own latent cache.
struct DecodeInputs {
  View q;     // (N, H, d_n + d_p)
  View kv_b;  // (H * (d_n + d_v), r)
  std::vector<View>
      latent;  // N caches (S_n, r + d_p): normalised latent, then the shared key; the query's token included
};
void decode(Context&, const Dims&, const DecodeInputs&, const View& o);  // Dims::tokens = N; o (N, H, d_v)

}  // namespace tessera::ops::mla
