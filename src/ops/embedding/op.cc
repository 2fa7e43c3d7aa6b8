// Checks, costs and the choice of back end.
#include "ops/embedding/op.h"

#include "ops/embedding/cpu.h"

namespace tessera::ops::embedding {
namespace {

void check_ids(const Dims& d, const View& ids) { check_view(ids, DType::i32, {d.tokens}, "embedding ids"); }

}  // namespace

Costs costs(const Dims& d, DType dtype, Pass pass) {
  const int64_t n = d.tokens * d.width, element = bytes_of(dtype), ids = d.tokens * bytes_of(DType::i32);
  if (pass == Pass::forward) return {.bytes_moved = 2 * n * element + ids};
  return {.vector_flops = n, .bytes_moved = 3 * n * element + ids};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.weight.dtype();
  check_ids(d, in.ids);
  check_view(in.weight, dtype, {d.vocabulary, d.width}, "embedding weight");
  check_view(out.y, dtype, {d.tokens, d.width}, "embedding y");
  OpScope op(ctx, "embedding", Pass::forward, costs(d, dtype, Pass::forward));
  if (ctx.dry()) return;
  cpu::forward(d, in, out);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = grads.weight.dtype();
  check_ids(d, in.ids);
  check_view(dout.y, dtype, {d.tokens, d.width}, "embedding dy");
  check_view(grads.weight, dtype, {d.vocabulary, d.width}, "embedding dweight");
  OpScope op(ctx, "embedding", Pass::backward, costs(d, dtype, Pass::backward));
  if (ctx.dry()) return;
  cpu::backward(d, in, dout, grads);
}

}  // namespace tessera::ops::embedding
