// What the layers share: where they are, and projections by parameter.
//
// A layer is a short function of op calls and, below it, its mirror image. What backward needs is a struct of named
// views, taken from the arena before the temporaries, so that temporaries are released first. It is taken in two parts:
// first what is dear to compute again (results of matrix products, of KDA and of attention), then what is cheap
// (convolutions, norms), which a layer may drop after forward and make again before backward.
#pragma once

#include "core/documents.h"
#include "dist/mesh.h"
#include "model/context_shard.h"
#include "model/parameters.h"
#include "ops/linear/op.h"

namespace tessera::model {

struct LayerContext {
  Context& ctx;
  const ModelConfig& config;
  const Weights& weights;
  Documents documents;
  int64_t tokens;  // T; a feed-forward part may be given a block of them, of whatever documents
  DType dtype;
  dist::Mesh* mesh = nullptr;           // null: this process alone
  double expert_imbalance = 0;          // ModelOptions
  const ContextShard* shard = nullptr;  // of the micro-batch whose tokens are cut among processes; null: it is whole
  bool output_wanted = true;            // false: forward again for what it saves, so that its last sum may be left out

  View allocate(Shape shape) const { return ctx.arena.allocate(dtype, shape); }
  View allocate_exact(Shape shape) const { return ctx.arena.allocate(exact_type(dtype), shape); }
};

inline ops::linear::Dims linear_dims(const LayerContext& lc, ParamId weight) {
  const Shape& shape = lc.weights[weight].shape();
  return {lc.tokens, shape[1], shape[0]};
}

// y (T, out) = x (T, in) W^T
inline void project(const LayerContext& lc, const View& x, ParamId weight, const View& y) {
  ops::linear::forward(lc.ctx, linear_dims(lc, weight), {x, lc.weights[weight]}, {y});
}

enum class Into : bool { overwrite = false, add = true };

// dx = (or +=) dy W, dW += dy^T x
inline void project_backward(const LayerContext& lc, const View& x, ParamId weight, const View& dy, const View& dx,
                             Into into) {
  ops::linear::backward(lc.ctx, linear_dims(lc, weight), {x, lc.weights[weight]}, {dy},
                        {dx, into == Into::add, lc.weights.d(weight)});
}

}  // namespace tessera::model
