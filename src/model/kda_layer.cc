#include "model/kda_layer.h"

#include "model/kda_context.h"
#include "ops/short_conv/op.h"
#include "ops/sigmoid_gate/op.h"

namespace tessera::model::kda_layer {
namespace {

int64_t inner(const LayerContext& lc) { return lc.config.kda.heads * lc.config.kda.head_dim; }

ops::kda::Dims kda_dims(const LayerContext& lc) {
  const auto& k = lc.config.kda;
  return {.tokens = lc.tokens,
          .heads = k.heads,
          .value_heads = k.heads,
          .key_dim = k.head_dim,
          .value_dim = k.head_dim,
          .chunk = k.chunk,
          .gate = k.gate,
          .lower_bound = k.lower_bound,
          .negative_eigenvalues = k.negative_eigenvalues};
}
ops::short_conv::Dims conv_dims(const LayerContext& lc) { return {lc.tokens, inner(lc), lc.config.kda.conv_width}; }
ops::l2_norm::Dims l2_dims(const LayerContext& lc) { return {lc.tokens * lc.config.kda.heads, lc.config.kda.head_dim}; }
ops::rms_norm::Dims norm_dims(const LayerContext& lc) {
  return {lc.tokens * lc.config.kda.heads, lc.config.kda.head_dim, lc.config.norm_eps};
}

View as_heads(const LayerContext& lc, const View& v) {  // (T, G) -> (T, H, K)
  return v.reshaped({lc.tokens, lc.config.kda.heads, lc.config.kda.head_dim});
}
View as_head_rows(const LayerContext& lc, const View& v) {  // (T, G) -> (T H, K)
  return v.reshaped({lc.tokens * lc.config.kda.heads, lc.config.kda.head_dim});
}
View conv_weight(const LayerContext& lc, const View& v) { return v.reshaped({inner(lc), lc.config.kda.conv_width}); }

void convolve(const LayerContext& lc, const View& x, ParamId weight, const View& y, const View& initial_window,
              const View& final_window) {
  ops::short_conv::forward(lc.ctx, conv_dims(lc),
                           {x, conv_weight(lc, lc.weights[weight]), initial_window, lc.documents}, {y, final_window});
}

ops::kda::Inputs kda_inputs(const LayerContext& lc, const KdaParams& p, const Saved& s) {
  const auto& k = lc.config.kda;
  return {as_heads(lc, s.q),
          as_heads(lc, s.k),
          as_heads(lc, s.v),
          as_heads(lc, s.z),
          s.beta_logit,
          lc.weights[p.a_log],
          lc.weights[p.dt_bias].reshaped({k.heads, k.head_dim}),
          s.initial_state,
          lc.documents};
}

// h = RMSNorm(o) gamma o sigmoid(gate), before the output projection
void gated_output(const LayerContext& lc, const KdaParams& p, const Saved& s, ops::rms_norm::Saved* norm,
                  const View& normed, const View& h) {
  ops::rms_norm::forward(lc.ctx, norm_dims(lc), {as_head_rows(lc, s.o), lc.weights[p.o_norm]},
                         {as_head_rows(lc, normed)}, norm);
  ops::sigmoid_gate::forward(lc.ctx, {lc.tokens, inner(lc)}, {normed, s.gate}, {h});
}

}  // namespace

Cache allocate_cache(Arena& arena, const ModelConfig& c, int64_t sequences, DType dtype) {
  const auto& k = c.kda;
  const Shape window{sequences, k.conv_width - 1, k.heads * k.head_dim};
  return {arena.allocate_zeroed(dtype, window), arena.allocate_zeroed(dtype, window),
          arena.allocate_zeroed(dtype, window),
          arena.allocate_zeroed(exact_type(dtype), {sequences, k.heads, k.head_dim, k.head_dim})};
}

Saved allocate_dear(const LayerContext& lc, bool training) {
  const auto& k = lc.config.kda;
  const Shape row{lc.tokens, inner(lc)}, latent{lc.tokens, k.gate_rank};
  Saved s;
  for (View* v : {&s.q_in, &s.k_in, &s.v_in, &s.z, &s.gate, &s.o}) *v = lc.allocate(row);
  s.decay_latent = lc.allocate(latent);
  if (k.output_gate == OutputGate::low_rank) s.gate_latent = lc.allocate(latent);
  s.beta_logit = lc.allocate({lc.tokens, k.heads});
  s.o_norm = ops::rms_norm::allocate_saved(lc.ctx, norm_dims(lc), lc.dtype);
  if (crosses(lc)) {
    for (View* v : {&s.q_window, &s.k_window, &s.v_window}) *v = allocate_window(lc, inner(lc), k.conv_width);
    s.initial_state = allocate_entering_state(lc, kda_dims(lc));
    s.transition = lc.ctx.arena.allocate_zeroed(exact_type(lc.dtype), {k.heads, k.head_dim, k.head_dim});
  }
  if (training) s.kda = ops::kda::allocate_saved(lc.ctx, kda_dims(lc), lc.documents, lc.dtype);
  return s;
}

void allocate_cheap(const LayerContext& lc, Saved& s) {
  for (View* v : {&s.q, &s.k, &s.v}) *v = lc.allocate({lc.tokens, inner(lc)});
  s.q_norm = ops::l2_norm::allocate_saved(lc.ctx, l2_dims(lc), lc.dtype);
  s.k_norm = ops::l2_norm::allocate_saved(lc.ctx, l2_dims(lc), lc.dtype);
}

void make_cheap(const LayerContext& lc, const KdaParams& p, Saved& s, Cache* cache) {
  const Cache none;
  const Cache& c = cache != nullptr ? *cache : none;
  convolve(lc, s.q_in, p.q_conv, s.q, cache != nullptr ? c.q_window : s.q_window, c.q_window);
  convolve(lc, s.k_in, p.k_conv, s.k, cache != nullptr ? c.k_window : s.k_window, c.k_window);
  convolve(lc, s.v_in, p.v_conv, s.v, cache != nullptr ? c.v_window : s.v_window, c.v_window);
  const View q_rows = as_head_rows(lc, s.q), k_rows = as_head_rows(lc, s.k);
  ops::l2_norm::forward(lc.ctx, l2_dims(lc), {q_rows}, {q_rows}, &s.q_norm);
  ops::l2_norm::forward(lc.ctx, l2_dims(lc), {k_rows}, {k_rows}, &s.k_norm);
}

void forward(const LayerContext& lc, const KdaParams& p, const View& x, const View& y, Saved& s, bool training,
             Cache* cache) {
  project(lc, x, p.q_proj, s.q_in);
  project(lc, x, p.k_proj, s.k_in);
  project(lc, x, p.v_proj, s.v_in);
  if (crosses(lc)) {
    window_from_left(lc, s.q_in, s.q_window);
    window_from_left(lc, s.k_in, s.k_window);
    window_from_left(lc, s.v_in, s.v_window);
  }
  make_cheap(lc, p, s, cache);
  project(lc, x, p.f_a, s.decay_latent);
  project(lc, s.decay_latent, p.f_b, s.z);
  project(lc, x, p.b_proj, s.beta_logit);
  if (p.g_proj != kNone) {
    project(lc, x, p.g_proj, s.gate);
  } else {
    project(lc, x, p.g_a, s.gate_latent);
    project(lc, s.gate_latent, p.g_b, s.gate);
  }

  ops::kda::Inputs in = kda_inputs(lc, p, s);
  const View o = as_heads(lc, s.o);
  if (cache == nullptr) {
    if (crosses(lc)) entering_state(lc, kda_dims(lc), in, s.transition, s.initial_state);
    ops::kda::forward(lc.ctx, kda_dims(lc), in, {o, View()}, training ? &s.kda : nullptr);
  } else if (lc.tokens == lc.documents.count()) {
    ops::kda::step(lc.ctx, kda_dims(lc), in, cache->state, o);
  } else {
    in.initial_state = cache->state;
    ops::kda::forward(lc.ctx, kda_dims(lc), in, {o, cache->state}, nullptr);
  }

  Arena::Scope scope(lc.ctx.arena);
  const View normed = lc.allocate({lc.tokens, inner(lc)}), h = lc.allocate({lc.tokens, inner(lc)});
  gated_output(lc, p, s, &s.o_norm, normed, h);
  project(lc, h, p.o_proj, y);
}

void backward(const LayerContext& lc, const KdaParams& p, const View& x, const Saved& s, const View& dy,
              const View& dx) {
  Arena::Scope scope(lc.ctx.arena);
  const Shape row{lc.tokens, inner(lc)};
  const View dh = lc.allocate(row), dgate = lc.allocate(row);
  {
    Arena::Scope inner_scope(lc.ctx.arena);
    const View normed = lc.allocate(row), h = lc.allocate(row);
    gated_output(lc, p, s, nullptr, normed, h);
    project_backward(lc, h, p.o_proj, dy, dh, Into::overwrite);
    ops::sigmoid_gate::backward(lc.ctx, {lc.tokens, inner(lc)}, {normed, s.gate}, {dh}, {dh, dgate});
  }
  if (p.g_proj != kNone) {
    project_backward(lc, x, p.g_proj, dgate, dx, Into::overwrite);
  } else {
    Arena::Scope inner_scope(lc.ctx.arena);
    const View dlatent = lc.allocate({lc.tokens, lc.config.kda.gate_rank});
    project_backward(lc, s.gate_latent, p.g_b, dgate, dlatent, Into::overwrite);
    project_backward(lc, x, p.g_a, dlatent, dx, Into::overwrite);
  }
  const View d_o = dh;  // in place
  ops::rms_norm::backward(lc.ctx, norm_dims(lc), {as_head_rows(lc, s.o), lc.weights[p.o_norm]}, s.o_norm,
                          {as_head_rows(lc, dh)}, {as_head_rows(lc, d_o), lc.weights.d(p.o_norm)});

  const View dq = lc.allocate(row), dk = lc.allocate(row), dv = lc.allocate(row), dz = dgate;  // dgate is spent
  const View dbeta = lc.allocate({lc.tokens, lc.config.kda.heads});
  ops::kda::Grads grads;
  grads.q = as_heads(lc, dq);
  grads.k = as_heads(lc, dk);
  grads.v = as_heads(lc, dv);
  grads.z = as_heads(lc, dz);
  grads.beta_logit = dbeta;
  grads.a_log = lc.weights.d(p.a_log);
  grads.dt_bias = lc.weights.d(p.dt_bias).reshaped({lc.config.kda.heads, lc.config.kda.head_dim});
  const ops::kda::Inputs in = kda_inputs(lc, p, s);
  const View d_state = leaving_gradient(lc, kda_dims(lc), in, s.kda, as_heads(lc, d_o), s.transition);
  ops::kda::backward(lc.ctx, kda_dims(lc), in, s.kda, {as_heads(lc, d_o), d_state}, grads);

  project_backward(lc, x, p.b_proj, dbeta, dx, Into::add);
  const View dlatent = lc.allocate({lc.tokens, lc.config.kda.gate_rank});
  project_backward(lc, s.decay_latent, p.f_b, dz, dlatent, Into::overwrite);
  project_backward(lc, x, p.f_a, dlatent, dx, Into::add);

  const View dq_rows = as_head_rows(lc, dq), dk_rows = as_head_rows(lc, dk);
  ops::l2_norm::backward(lc.ctx, l2_dims(lc), {as_head_rows(lc, s.q)}, s.q_norm, {dq_rows}, {dq_rows});
  ops::l2_norm::backward(lc.ctx, l2_dims(lc), {as_head_rows(lc, s.k)}, s.k_norm, {dk_rows}, {dk_rows});
  const View d_in = d_o;  // spent
  const auto stream = [&](const View& x_in, ParamId conv, const View& window, const View& d_out, ParamId proj) {
    Arena::Scope one(lc.ctx.arena);
    const View dwindow = window.present() ? lc.allocate(window.shape()) : View();
    ops::short_conv::backward(lc.ctx, conv_dims(lc), {x_in, conv_weight(lc, lc.weights[conv]), window, lc.documents},
                              {d_out}, {d_in, conv_weight(lc, lc.weights.d(conv)), dwindow});
    if (window.present()) window_gradient_to_left(lc, dwindow, d_in);
    project_backward(lc, x, proj, d_in, dx, Into::add);
  };
  stream(s.q_in, p.q_conv, s.q_window, dq, p.q_proj);
  stream(s.k_in, p.k_conv, s.k_window, dk, p.k_proj);
  stream(s.v_in, p.v_conv, s.v_window, dv, p.v_proj);
}

}  // namespace tessera::model::kda_layer
