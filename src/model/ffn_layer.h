// Feed-forward parts: the gated MLP (dense layers and shared experts) and LatentMoE. An MLP whose hidden width is cut
// among processes sums its terms itself (tensor_shard.h).
// Source: moe.md 1 (router), 3 (LatentMoE, its stabilising norm and backward), 4 (activation).
#pragma once

#include "dist/expert_exchange.h"
#include "model/layer.h"
#include "ops/experts/op.h"
#include "ops/rms_norm/op.h"
#include "ops/router/balance.h"

namespace tessera::model::mlp {

struct Saved {
  View gate, up;  // (T, F) pre-activations
};

Saved allocate_dear(const LayerContext&, const DenseParams&);  // nothing in it is cheap
void forward(const LayerContext&, const DenseParams&, const View& x, const View& y, Saved&);
void backward(const LayerContext&, const DenseParams&, const View& x, const Saved&, const View& dy, const View& dx,
              Into into);

}  // namespace tessera::model::mlp

namespace tessera::model::latent_moe {

// Rows that came from the members of the expert axis, R in all, and the choices that came with them.
struct Visitors {
  dist::Routes routes;
  View z, indices, weights;  // (R, L), (R, k), (R, k)
};

struct Saved {
  ops::router::Outputs routing;  // (T, k) experts, weights, scores; (T) cutoff
  View z;                        // (T, L): input of the experts; absent without a latent, where it is x
  Visitors visitors;             // where experts are shared out among processes
  ops::experts::Saved experts;   // of this process, on the rows of all or of its own tokens
  View u, n;  // (T, L): sum of the experts, before and after the norm; absent without a latent / norm
  ops::rms_norm::Saved norm;
  mlp::Saved shared;
};

// Counts of one layer in a training step; absent in evaluation, inference and recomputation.
struct Counting {
  const ops::router::BalanceOptions& options;
  const ops::router::Counters& counters;
};

Saved allocate_dear(const LayerContext&, const MoeParams&);
void allocate_cheap(const LayerContext&, const MoeParams&, Saved&);
void forward(const LayerContext&, const MoeParams&, const View& x, const View& y, Saved&, const Counting*);
void make_cheap(const LayerContext&, const MoeParams&, Saved&);  // from the dear part; same bits
// Adds the gradient of `z_loss` times the sum of the router's z-losses; 0: none, and nothing is computed for it.
void backward(const LayerContext&, const MoeParams&, const View& x, const Saved&, const View& dy, const View& dx,
              double z_loss);

}  // namespace tessera::model::latent_moe
