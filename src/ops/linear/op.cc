// Checks, costs and the choice of back end.
#include "ops/linear/op.h"

#include <algorithm>

#include "ops/gemm/cuda.h"
#include "ops/linear/cpu.h"
#include "ops/linear/cuda.h"

namespace tessera::ops::linear {
namespace {

// Of one product on a CPU; float64 runs are proofs: their operands are never rounded.
int64_t scratch_bytes(const Types& types, Product product, int64_t m, int64_t n, int64_t k) {
  return types.x == DType::f32 ? gemm_scratch_bytes(product, m, n, k) : 0;
}

cuda::Workspace allocate_cuda(Arena& arena, const Dims& d, const Types& types, Pass pass) {
  cuda::Workspace w{.product = gemm_workspace(arena), .weight = {}, .dy = {}, .sums = {}};
  if (types.x == types.weight) return w;
  const int64_t out = cuda::padded_out(d), rows = std::min(d.tokens, cuda::kSplitRows);
  const bool forward = pass == Pass::forward;
  w.weight = arena.allocate(DType::bf16, {(forward ? 3 : 4) * out, d.in});
  if (!forward) w.dy = arena.allocate(DType::bf16, {rows, 4 * out});
  w.sums = arena.allocate(DType::f32, forward ? Shape{rows, 3 * out} : Shape{3 * out, d.in});
  return w;
}
int64_t cuda_workspace_bytes(const Dims& d, const Types& types, Pass pass) {
  Arena arena = Arena::dry();
  allocate_cuda(arena, d, types, pass);
  return arena.used();
}

Costs backward_costs(const Dims& d, const Types& types, Product product, Device back_end, bool x_wanted,
                     bool weight_wanted) {
  const int64_t x = d.tokens * d.in * bytes_of(types.x), y = d.tokens * d.out * bytes_of(types.y);
  const int64_t weight = d.out * d.in;
  Costs c;
  if (x_wanted) {
    c.gemm_flops += 2 * d.tokens * d.in * d.out;
    c.bytes_moved += y + weight * bytes_of(types.weight) + x;
    c.workspace_bytes = scratch_bytes(types, product, d.tokens, d.in, d.out);
  }
  if (weight_wanted) {
    c.gemm_flops += 2 * d.tokens * d.in * d.out;
    c.bytes_moved += y + x + 2 * weight * bytes_of(exact_type(types.x));
    c.workspace_bytes = std::max(c.workspace_bytes, scratch_bytes(types, product, d.out, d.in, d.tokens));
  }
  if (back_end == Device::cuda) c.workspace_bytes = cuda_workspace_bytes(d, types, Pass::backward);
  return c;
}

Types check_inputs(const Dims& d, const Inputs& in, const View& y) {
  const Types types{in.x.dtype(), in.weight.dtype(), y.dtype()};
  const DType exact = exact_type(types.x);
  check_strided_view(in.x, types.x, {d.tokens, d.in}, "linear x");
  check_view(in.weight, types.weight == exact ? exact : types.x, {d.out, d.in}, "linear weight");
  return types;
}

}  // namespace

Costs costs(const Dims& d, const Types& types, Pass pass, Product product, Device back_end) {
  if (pass == Pass::backward) return backward_costs(d, types, product, back_end, true, true);
  return {.gemm_flops = 2 * d.tokens * d.in * d.out,
          .bytes_moved = d.tokens * d.in * bytes_of(types.x) + d.out * d.in * bytes_of(types.weight) +
                         d.tokens * d.out * bytes_of(types.y),
          .workspace_bytes = back_end == Device::cuda ? cuda_workspace_bytes(d, types, Pass::forward)
                                                      : scratch_bytes(types, product, d.tokens, d.out, d.in)};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const Types types = check_inputs(d, in, out.y);
  const DType exact = exact_type(types.x);
  check_strided_view(out.y, types.y == exact ? exact : types.weight, {d.tokens, d.out}, "linear y");
  const Costs c = costs(d, types, Pass::forward, ctx.product, ctx.back_end());
  OpScope op(ctx, "linear", Pass::forward, c);
  if (ctx.back_end() == Device::cuda) {
    const auto workspace = allocate_cuda(ctx.arena, d, types, Pass::forward);
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out, workspace);
    return;
  }
  const View scratch = ctx.arena.allocate(DType::u8, {c.workspace_bytes});
  if (ctx.dry()) return;
  cpu::forward(d, in, out, ctx.product, scratch);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const Types types = check_inputs(d, in, dout.y);
  check_strided_view(dout.y, types.weight, {d.tokens, d.out}, "linear dy");
  if (grads.x.present()) check_strided_view(grads.x, types.x, {d.tokens, d.in}, "linear dx");
  if (grads.weight.present()) check_view(grads.weight, exact_type(types.x), {d.out, d.in}, "linear dweight");
  const Costs c = backward_costs(d, types, ctx.product, ctx.back_end(), grads.x.present(), grads.weight.present());
  OpScope op(ctx, "linear", Pass::backward, c);
  if (ctx.back_end() == Device::cuda) {
    const auto workspace = allocate_cuda(ctx.arena, d, types, Pass::backward);
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, dout, grads, workspace);
    return;
  }
  const View scratch = ctx.arena.allocate(DType::u8, {c.workspace_bytes});
  if (ctx.dry()) return;
  cpu::backward(d, in, dout, grads, ctx.product, scratch);
}

}  // namespace tessera::ops::linear
