// Checks, costs and the choice of back end.
#include "ops/router/op.h"

#include "ops/router/cpu.h"
#include "ops/router/cuda.h"

namespace tessera::ops::router {
namespace {

void check_outputs(const Dims& d, DType dtype, const Outputs& out) {
  check_view(out.experts, DType::i32, {d.tokens, d.top_k}, "router experts");
  check_view(out.weights, dtype, {d.tokens, d.top_k}, "router weights");
  check_view(out.scores, dtype, {d.tokens, d.top_k}, "router scores");
  check_view(out.cutoff, dtype, {d.tokens}, "router cutoff");
  check_view(out.invalid, DType::i64, {1}, "router invalid");
  if (needs_all_scores(d)) check_view(out.all_scores, dtype, {d.tokens, d.experts}, "router all_scores");
}

int64_t bytes(DType dtype, const Shape& shape) { return Arena::aligned(shape.elements() * bytes_of(dtype)); }

}  // namespace

void check_dims(const Dims& d) {
  TESSERA_CHECK(d.top_k >= 1 && d.top_k <= d.experts, "router: k = {} of E = {} experts", d.top_k, d.experts);
  TESSERA_CHECK(d.groups >= 1 && d.experts % d.groups == 0 && d.top_groups >= 1 && d.top_groups <= d.groups,
                "router: {} of {} groups, {} experts", d.top_groups, d.groups, d.experts);
  TESSERA_CHECK(d.top_k <= d.experts / d.groups * d.top_groups, "router: k = {} of {} experts in the kept groups",
                d.top_k, d.experts / d.groups * d.top_groups);
}

Costs costs(const Dims& d, DType dtype, Pass pass, Device back_end) {
  const int64_t n = d.tokens * d.experts, selected = d.tokens * d.top_k, element = bytes_of(dtype);
  const int64_t all_scores = needs_all_scores(d) ? n * element : 0;
  if (pass == Pass::forward) {
    const int64_t scratch = bytes(dtype, cpu::reals_shape(d)) + bytes(DType::i32, cpu::indices_shape(d));
    return {.vector_flops = 20 * n,
            .bytes_moved = (n + d.experts + 2 * selected + d.tokens) * element + selected * 4 + all_scores,
            .workspace_bytes = back_end == Device::cuda ? 0 : scratch};
  }
  return {.vector_flops = 10 * selected + (all_scores > 0 ? 2 * n : 0),
          .bytes_moved = (n + 3 * selected) * element + selected * 4 + all_scores};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = exact_type(in.logits.dtype());
  check_dims(d);
  check_strided_view(in.logits, dtype, {d.tokens, d.experts}, "router logits");
  check_view(in.bias, dtype, {d.experts}, "router bias");
  check_outputs(d, dtype, out);
  OpScope op(ctx, "router", Pass::forward, costs(d, dtype, Pass::forward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out);
    return;
  }
  const cpu::Workspace workspace{ctx.arena.allocate(dtype, cpu::reals_shape(d)),
                                 ctx.arena.allocate(DType::i32, cpu::indices_shape(d))};
  if (ctx.dry()) return;
  cpu::forward(d, in, out, workspace);
}

void backward(Context& ctx, const Dims& d, const Outputs& out, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = exact_type(grads.logits.dtype());
  check_dims(d);
  check_outputs(d, dtype, out);
  check_view(dout.weights, dtype, {d.tokens, d.top_k}, "router dweights");
  check_strided_view(grads.logits, dtype, {d.tokens, d.experts}, "router dlogits");
  OpScope op(ctx, "router", Pass::backward, costs(d, dtype, Pass::backward, ctx.back_end()));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::backward(ctx.stream(), d, out, dout, grads);
  cpu::backward(d, out, dout, grads);
}

}  // namespace tessera::ops::router
