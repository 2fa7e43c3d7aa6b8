#pragma once

#include "ops/mla/op.h"

namespace tessera::ops::mla::cpu {

// Views of the arena that one call works in. Sizes follow from the dims, the documents and thread_count() alone.
struct ForwardWorkspace {
  View blocks;     // (query blocks, 2) int64: document, first query
  View max_logit;  // (query blocks, H)
  View threads;    // (thread_count(), elements of one thread's blocks)
};
struct BackwardWorkspace {
  View delta;      // (T, H): <do, o>
  View dk_shared;  // (H, tokens of a key group, d_p): each head's part, added in head order
  View threads;
};
struct DecodeWorkspace {
  View query;    // (N, H, r + d_p): queries in the latent space, scaled
  View chunks;   // (key chunks, 2) int64: sequence, first key
  View maximum;  // (key chunks, H)
  View sum;      // (key chunks, H)
  View mixture;  // (key chunks, H, r): sum of exp(logit - maximum) latent
  View merged;   // (N, H, r)
  View threads;  // (thread_count(), H * keys of a chunk): logits
};

ForwardWorkspace allocate_forward(Arena&, const Dims&, const Documents&, DType);
BackwardWorkspace allocate_backward(Arena&, const Dims&, DType);
DecodeWorkspace allocate_decode(Arena&, const Dims&, const DecodeInputs&);

void forward(const Dims&, const Inputs&, const Outputs&, Saved*, const ForwardWorkspace&);
void backward(const Dims&, const Inputs&, const Outputs&, const Saved&, const OutputGrads&, const Grads&,
              const BackwardWorkspace&);
void decode(const Dims&, const DecodeInputs&, const View& o, const DecodeWorkspace&);

}  // namespace tessera::ops::mla::cpu
