// Checks, costs and the choice of back end.
#include "ops/embedding/op.h"

#include "ops/embedding/cpu.h"
#include "ops/embedding/cuda.h"

namespace tessera::ops::embedding {
namespace {

void check_ids(const Dims& d, const View& ids) { check_view(ids, DType::i32, {d.tokens}, "embedding ids"); }

}  // namespace

Costs costs(const Dims& d, DType dtype, Pass pass, Device back_end) {
  const int64_t n = d.tokens * d.width, element = bytes_of(dtype), ids = d.tokens * bytes_of(DType::i32);
  if (pass == Pass::forward) return {.bytes_moved = 2 * n * element + ids};
  return {.vector_flops = n,
          .bytes_moved = n * element + 2 * n * bytes_of(exact_type(dtype)) + ids,
          .workspace_bytes = back_end == Device::cuda ? cuda::workspace_bytes(d) : 0};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.weight.dtype();
  check_ids(d, in.ids);
  check_view(in.weight, dtype, {d.vocabulary, d.width}, "embedding weight");
  check_view(out.y, dtype, {d.tokens, d.width}, "embedding y");
  OpScope op(ctx, "embedding", Pass::forward, costs(d, dtype, Pass::forward, ctx.back_end()));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out);
  cpu::forward(d, in, out);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = dout.y.dtype();
  check_ids(d, in.ids);
  check_view(dout.y, dtype, {d.tokens, d.width}, "embedding dy");
  check_view(grads.weight, exact_type(dtype), {d.vocabulary, d.width}, "embedding dweight");
  OpScope op(ctx, "embedding", Pass::backward, costs(d, dtype, Pass::backward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    const cuda::Workspace workspace = cuda::allocate(ctx.arena, d);
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, dout, grads, workspace);
    return;
  }
  if (ctx.dry()) return;
  cpu::backward(d, in, dout, grads);
}

}  // namespace tessera::ops::embedding
