// Checks, costs and the choice of back end.
#include "ops/linear/op.h"

#include <algorithm>

#include "ops/gemm/gemm.h"
#include "ops/linear/cpu.h"

namespace tessera::ops::linear {
namespace {

// float64 runs are proofs: their operands are never rounded.
int64_t scratch_bytes(DType dtype, Product product, int64_t m, int64_t n, int64_t k) {
  return dtype == DType::f32 ? gemm_scratch_bytes(product, m, n, k) : 0;
}

Costs backward_costs(const Dims& d, DType dtype, Product product, bool x_wanted, bool weight_wanted) {
  const int64_t x = d.tokens * d.in, y = d.tokens * d.out, weight = d.out * d.in;
  Costs c;
  if (x_wanted) {
    c.gemm_flops += 2 * d.tokens * d.in * d.out;
    c.bytes_moved += (y + weight + x) * bytes_of(dtype);
    c.workspace_bytes = scratch_bytes(dtype, product, d.tokens, d.in, d.out);
  }
  if (weight_wanted) {
    c.gemm_flops += 2 * d.tokens * d.in * d.out;
    c.bytes_moved += (y + x + 2 * weight) * bytes_of(dtype);
    c.workspace_bytes = std::max(c.workspace_bytes, scratch_bytes(dtype, product, d.out, d.in, d.tokens));
  }
  return c;
}

}  // namespace

Costs costs(const Dims& d, DType dtype, Pass pass, Product product) {
  if (pass == Pass::backward) return backward_costs(d, dtype, product, true, true);
  return {.gemm_flops = 2 * d.tokens * d.in * d.out,
          .bytes_moved = (d.tokens * (d.in + d.out) + d.out * d.in) * bytes_of(dtype),
          .workspace_bytes = scratch_bytes(dtype, product, d.tokens, d.out, d.in)};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.x.dtype();
  check_strided_view(in.x, dtype, {d.tokens, d.in}, "linear x");
  check_view(in.weight, dtype, {d.out, d.in}, "linear weight");
  check_strided_view(out.y, dtype, {d.tokens, d.out}, "linear y");
  const Costs c = costs(d, dtype, Pass::forward, ctx.product);
  OpScope op(ctx, "linear", Pass::forward, c);
  const View scratch = ctx.arena.allocate(DType::u8, {c.workspace_bytes});
  if (ctx.dry()) return;
  cpu::forward(d, in, out, ctx.product, scratch);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = in.x.dtype();
  check_strided_view(in.x, dtype, {d.tokens, d.in}, "linear x");
  check_view(in.weight, dtype, {d.out, d.in}, "linear weight");
  check_strided_view(dout.y, dtype, {d.tokens, d.out}, "linear dy");
  if (grads.x.present()) check_strided_view(grads.x, dtype, {d.tokens, d.in}, "linear dx");
  if (grads.weight.present()) check_view(grads.weight, dtype, {d.out, d.in}, "linear dweight");
  const Costs c = backward_costs(d, dtype, ctx.product, grads.x.present(), grads.weight.present());
  OpScope op(ctx, "linear", Pass::backward, c);
  const View scratch = ctx.arena.allocate(DType::u8, {c.workspace_bytes});
  if (ctx.dry()) return;
  cpu::backward(d, in, dout, grads, ctx.product, scratch);
}

}  // namespace tessera::ops::linear
