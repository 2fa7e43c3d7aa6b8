#include "model/ffn_layer.h"

#include "model/tensor_shard.h"
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
  sum_outputs(lc, y);
}

void backward(const LayerContext& lc, const DenseParams& p, const View& x, const Saved& s, const View& dy,
              const View& dx, Into into) {
  Arena::Scope scope(lc.ctx.arena);
  const View h = lc.allocate(s.gate.shape()), dh = lc.allocate(s.gate.shape());
  ops::glu::forward(lc.ctx, glu_dims(lc, s.gate), {s.gate, s.up}, {h});
  project_backward(lc, h, p.down, dy, dh, Into::overwrite);
  const View dgate = h, dup = dh;  // h is spent; dh is read before it is written, element by element
  ops::glu::backward(lc.ctx, glu_dims(lc, s.gate), {s.gate, s.up}, {dh}, {dgate, dup});
  // What dx holds is the same everywhere already, and must not be summed again.
  const bool apart = into == Into::add && is_cut(lc);
  const View term = apart ? lc.allocate(dx.shape()) : dx;
  project_backward(lc, x, p.gate, dgate, term, apart ? Into::overwrite : into);
  project_backward(lc, x, p.up, dup, term, Into::add);
  sum_terms(lc, term);
  if (apart) ops::elementwise::add_to(lc.ctx, term, dx);
}

}  // namespace tessera::model::mlp

namespace tessera::model::latent_moe {
namespace {

ops::router::Dims router_dims(const LayerContext& lc) {
  const auto& m = lc.config.moe;
  return {lc.tokens, m.experts, m.top_k, m.scale, m.renormalise, m.score, m.groups, m.top_groups};
}
ops::experts::Dims expert_dims(const LayerContext& lc, const MoeParams& p, int64_t rows) {
  const auto& m = lc.config.moe;
  return {rows, lc.weights[p.w1].dim(0), m.top_k, lc.config.expert_width(), m.hidden, lc.config.ffn.activation};
}
ops::rms_norm::Dims norm_dims(const LayerContext& lc) {
  return {lc.tokens, lc.config.expert_width(), lc.config.norm_eps};
}
// Whether other processes hold some of the experts.
bool shares_experts(const LayerContext& lc) { return lc.mesh != nullptr && !lc.mesh->expert.alone(); }
dist::ExpertRanges expert_ranges(const LayerContext& lc) { return {lc.config.moe.experts, lc.mesh->expert.size()}; }

ops::experts::Inputs expert_inputs(const LayerContext& lc, const MoeParams& p, const View& z, const View& indices,
                                   const View& weights) {
  return {z, indices, weights, lc.weights[p.w1], lc.weights[p.w3], lc.weights[p.w2]};
}

// z (T, L) to y (T, L) by the experts of all processes. `squares` (E): of ops::experts::Outputs.
void experts_forward(const LayerContext& lc, const MoeParams& p, const View& z, const View& y, const View& squares,
                     Saved& s) {
  const auto& m = lc.config.moe;
  const int64_t width = lc.config.expert_width();
  if (!shares_experts(lc)) {
    return ops::experts::forward(lc.ctx, expert_dims(lc, p, lc.tokens),
                                 expert_inputs(lc, p, z, s.routing.experts, s.routing.weights), {y, squares},
                                 &s.experts);
  }
  dist::Communicator& axis = lc.mesh->expert;
  const dist::ExpertRanges ranges = expert_ranges(lc);
  Visitors& v = s.visitors;
  v.routes = plan_routes(lc.ctx, axis, ranges, s.routing.experts, lc.expert_imbalance);
  v.z = lc.allocate({v.routes.rows, width});
  v.indices = lc.ctx.arena.allocate(DType::i32, {v.routes.rows, m.top_k});
  v.weights = lc.allocate_exact({v.routes.rows, m.top_k});
  const ops::experts::Dims dims = expert_dims(lc, p, v.routes.rows);
  s.experts = ops::experts::allocate_saved(lc.ctx, dims, lc.dtype);
  dispatch(lc.ctx, axis, v.routes, z, v.z);
  dispatch(lc.ctx, axis, v.routes, s.routing.experts, v.indices);
  dispatch(lc.ctx, axis, v.routes, s.routing.weights, v.weights);
  keep_own(lc.ctx, ranges, axis.rank(), v.indices);

  Arena::Scope scope(lc.ctx.arena);
  const View returned = lc.allocate({v.routes.rows, width});
  const View own = squares.present() ? squares.row_range(ranges.begin(axis.rank()), ranges.count(axis.rank())) : View();
  ops::experts::forward(lc.ctx, dims, expert_inputs(lc, p, v.z, v.indices, v.weights), {returned, own}, &s.experts);
  combine(lc.ctx, axis, v.routes, returned, y);
}

// dy (T, L) -> dz (T, L) and dweights (T, k), both overwritten.
void experts_backward(const LayerContext& lc, const MoeParams& p, const View& z, const Saved& s, const View& dy,
                      const View& dz, const View& dweights) {
  const View dw1 = lc.weights.d(p.w1), dw3 = lc.weights.d(p.w3), dw2 = lc.weights.d(p.w2);
  if (!shares_experts(lc)) {
    return ops::experts::backward(lc.ctx, expert_dims(lc, p, lc.tokens),
                                  expert_inputs(lc, p, z, s.routing.experts, s.routing.weights), s.experts, {dy},
                                  {dz, dweights, dw1, dw3, dw2});
  }
  dist::Communicator& axis = lc.mesh->expert;
  const Visitors& v = s.visitors;
  Arena::Scope scope(lc.ctx.arena);
  const View dy_rows = lc.allocate(v.z.shape()), dz_rows = lc.allocate(v.z.shape());
  const View dweight_rows = lc.allocate_exact(v.weights.shape());
  dispatch(lc.ctx, axis, v.routes, dy, dy_rows);
  ops::experts::backward(lc.ctx, expert_dims(lc, p, v.routes.rows), expert_inputs(lc, p, v.z, v.indices, v.weights),
                         s.experts, {dy_rows}, {dz_rows, dweight_rows, dw1, dw3, dw2});
  combine(lc.ctx, axis, v.routes, dz_rows, dz);
  combine(lc.ctx, axis, v.routes, dweight_rows, dweights);  // each choice is one owner's, and zero in the others
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
  if (m.latent > 0) {
    s.z = lc.allocate(latent);
    s.u = lc.allocate(latent);
  }
  if (!shares_experts(lc)) s.experts = ops::experts::allocate_saved(lc.ctx, expert_dims(lc, p, lc.tokens), lc.dtype);
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
    experts_forward(lc, p, s.z, s.u, squares, s);
    make_cheap(lc, p, s);
    project(lc, s.n.present() ? s.n : s.u, p.up, y);
  } else {
    experts_forward(lc, p, x, y, squares, s);
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
  experts_backward(lc, p, s.z.present() ? s.z : x, s, du, dz, dweights);
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
