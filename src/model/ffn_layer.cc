#include "model/ffn_layer.h"

#include "ops/elementwise/op.h"
#include "ops/glu/op.h"
#include "ops/router/z_loss.h"

namespace tessera::model::mlp {
namespace {

ops::glu::Dims glu_dims(const LayerContext& lc, const View& gate) {
  return {lc.tokens, gate.dim(1), lc.config.ffn.activation};
}

}  // namespace

Saved allocate_dear(const LayerContext& lc, const DenseParams& p) {
  const Shape hidden{lc.tokens, lc.weights[p.gate].dim(0)};
  return {lc.allocate(hidden), lc.allocate(hidden)};
}

void forward(const LayerContext& lc, const DenseParams& p, const View& x, const View& y, Saved& s) {
  project(lc, x, p.gate, s.gate);
  project(lc, x, p.up, s.up);
  Arena::Scope scope(lc.ctx.arena);
  const View h = lc.allocate(s.gate.shape());
  ops::glu::forward(lc.ctx, glu_dims(lc, s.gate), {s.gate, s.up}, {h});
  project(lc, h, p.down, y);
}

void backward(const LayerContext& lc, const DenseParams& p, const View& x, const Saved& s, const View& dy,
              const View& dx, Into into) {
  Arena::Scope scope(lc.ctx.arena);
  const View h = lc.allocate(s.gate.shape()), dh = lc.allocate(s.gate.shape());
  ops::glu::forward(lc.ctx, glu_dims(lc, s.gate), {s.gate, s.up}, {h});
  project_backward(lc, h, p.down, dy, dh, Into::overwrite);
  const View dgate = h, dup = dh;  // h is spent; dh is read before it is written, element by element
  ops::glu::backward(lc.ctx, glu_dims(lc, s.gate), {s.gate, s.up}, {dh}, {dgate, dup});
  project_backward(lc, x, p.gate, dgate, dx, into);
  project_backward(lc, x, p.up, dup, dx, Into::add);
}

}  // namespace tessera::model::mlp

namespace tessera::model::latent_moe {
namespace {

ops::router::Dims router_dims(const LayerContext& lc) {
  const auto& m = lc.config.moe;
  return {lc.tokens, m.experts, m.top_k, m.scale, m.renormalise, m.score, m.groups, m.top_groups};
}
ops::experts::Dims expert_dims(const LayerContext& lc) {
  const auto& m = lc.config.moe;
  return {lc.tokens, m.experts, m.top_k, lc.config.expert_width(), m.hidden, lc.config.ffn.activation};
}
ops::rms_norm::Dims norm_dims(const LayerContext& lc) {
  return {lc.tokens, lc.config.expert_width(), lc.config.norm_eps};
}
ops::experts::Inputs expert_inputs(const LayerContext& lc, const MoeParams& p, const View& x, const Saved& s) {
  return {s.z.present() ? s.z : x, s.routing.experts, s.routing.weights,
          lc.weights[p.w1],        lc.weights[p.w3],  lc.weights[p.w2]};
}

// The router's products keep float32 operands whatever the run's product type: selection compares the third decimal.
Context float32_products(const LayerContext& lc) {
  Context f32 = lc.ctx;
  f32.product = Product::f32;
  return f32;
}

void router_logits(const LayerContext& lc, const MoeParams& p, const View& x, const View& logits) {
  Context f32 = float32_products(lc);
  ops::linear::forward(f32, linear_dims(lc, p.router), {x, lc.weights[p.router]}, {logits});
}

}  // namespace

Saved allocate_dear(const LayerContext& lc, const MoeParams& p) {
  const auto& m = lc.config.moe;
  const Shape latent{lc.tokens, lc.config.expert_width()};
  Saved s;
  s.routing.experts = lc.ctx.arena.allocate(DType::i32, {lc.tokens, m.top_k});
  s.routing.weights = lc.allocate_exact({lc.tokens, m.top_k});
  s.routing.scores = lc.allocate_exact({lc.tokens, m.top_k});
  s.routing.cutoff = lc.allocate_exact({lc.tokens});
  s.routing.invalid = lc.ctx.arena.allocate_zeroed(DType::i64, {1});
  s.experts = ops::experts::allocate_saved(lc.ctx, expert_dims(lc), lc.dtype);
  if (m.latent > 0) {
    s.z = lc.allocate(latent);
    s.u = lc.allocate(latent);
  }
  if (m.shared > 0) s.shared = mlp::allocate_dear(lc, p.shared);
  return s;
}

void allocate_cheap(const LayerContext& lc, const MoeParams& p, Saved& s) {
  if (p.norm == kNone) return;
  s.n = lc.allocate(s.u.shape());
  s.norm = ops::rms_norm::allocate_saved(lc.ctx, norm_dims(lc), lc.dtype);
}

void make_cheap(const LayerContext& lc, const MoeParams& p, Saved& s) {
  if (p.norm == kNone) return;
  ops::rms_norm::forward(lc.ctx, norm_dims(lc), {s.u, lc.weights[p.norm]}, {s.n}, &s.norm);
}

void forward(const LayerContext& lc, const MoeParams& p, const View& x, const View& y, Saved& s,
             const Counting* counting) {
  const auto& m = lc.config.moe;
  const View squares = counting != nullptr ? counting->counters.output_squares : View();
  {
    Arena::Scope scope(lc.ctx.arena);
    const View logits = lc.allocate_exact({lc.tokens, m.experts});
    router_logits(lc, p, x, logits);
    const ops::router::Inputs in{logits, lc.weights[p.bias]};
    if (counting != nullptr) s.routing.invalid = counting->counters.invalid;  // summed over the micro-batches of a step
    ops::router::forward(lc.ctx, router_dims(lc), in, s.routing);
    if (counting != nullptr) {
      ops::router::count(lc.ctx, router_dims(lc), in, s.routing, counting->options, counting->counters);
    }
  }
  if (m.latent > 0) {
    project(lc, x, p.down, s.z);
    ops::experts::forward(lc.ctx, expert_dims(lc), expert_inputs(lc, p, x, s), {s.u, squares}, &s.experts);
    make_cheap(lc, p, s);
    project(lc, s.n.present() ? s.n : s.u, p.up, y);
  } else {
    ops::experts::forward(lc.ctx, expert_dims(lc), expert_inputs(lc, p, x, s), {y, squares}, &s.experts);
  }
  if (m.shared == 0) return;
  Arena::Scope scope(lc.ctx.arena);
  const View shared = lc.allocate({lc.tokens, lc.config.width});
  mlp::forward(lc, p.shared, x, shared, s.shared);
  ops::elementwise::add_to(lc.ctx, shared, y);
}

void backward(const LayerContext& lc, const MoeParams& p, const View& x, const Saved& s, const View& dy, const View& dx,
              double z_loss) {
  const auto& m = lc.config.moe;
  Arena::Scope scope(lc.ctx.arena);
  const View dz = lc.allocate({lc.tokens, lc.config.expert_width()});
  const View dweights = lc.allocate_exact({lc.tokens, m.top_k}), dlogits = lc.allocate_exact({lc.tokens, m.experts});
  View du = dy;
  if (m.latent > 0) {
    du = lc.allocate({lc.tokens, lc.config.expert_width()});
    project_backward(lc, s.n.present() ? s.n : s.u, p.up, dy, du, Into::overwrite);
    if (p.norm != kNone) {
      ops::rms_norm::backward(lc.ctx, norm_dims(lc), {s.u, lc.weights[p.norm]}, s.norm, {du},
                              {du, lc.weights.d(p.norm)});
    }
  }
  ops::experts::backward(lc.ctx, expert_dims(lc), expert_inputs(lc, p, x, s), s.experts, {du},
                         {dz, dweights, lc.weights.d(p.w1), lc.weights.d(p.w3), lc.weights.d(p.w2)});
  ops::router::backward(lc.ctx, router_dims(lc), s.routing, {dweights}, {dlogits});
  if (z_loss > 0) {
    Arena::Scope recomputed(lc.ctx.arena);
    const View logits = lc.allocate_exact({lc.tokens, m.experts});
    router_logits(lc, p, x, logits);
    ops::router::z_loss::backward(lc.ctx, {lc.tokens, m.experts}, {logits}, z_loss, {dlogits});
  }
  Context f32 = float32_products(lc);
  ops::linear::backward(f32, linear_dims(lc, p.router), {x, lc.weights[p.router]}, {dlogits},
                        {dx, false, lc.weights.d(p.router)});
  if (m.latent > 0) {
    project_backward(lc, x, p.down, dz, dx, Into::add);
  } else {
    ops::elementwise::add_to(lc.ctx, dz, dx);
  }
  if (m.shared > 0) mlp::backward(lc, p.shared, x, s.shared, dy, dx, Into::add);
}

}  // namespace tessera::model::latent_moe
