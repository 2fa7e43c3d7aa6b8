// Checks, costs and the choice of back end.
#include "ops/sigmoid_gate/op.h"

#include "ops/sigmoid_gate/cpu.h"
#include "ops/sigmoid_gate/cuda.h"

namespace tessera::ops::sigmoid_gate {

Costs costs(const Dims& d, DType dtype, Pass pass) {
  const int64_t n = d.rows * d.width, element = bytes_of(dtype);
  if (pass == Pass::forward) return {.vector_flops = 5 * n, .bytes_moved = 3 * n * element};
  return {.vector_flops = 9 * n, .bytes_moved = 5 * n * element};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.x.dtype();
  const Shape shape{d.rows, d.width};
  check_view(in.x, dtype, shape, "sigmoid_gate x");
  check_view(in.w, dtype, shape, "sigmoid_gate w");
  check_view(out.y, dtype, shape, "sigmoid_gate y");
  OpScope op(ctx, "sigmoid_gate", Pass::forward, costs(d, dtype, Pass::forward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out);
  cpu::forward(d, in, out);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = in.x.dtype();
  const Shape shape{d.rows, d.width};
  check_view(in.x, dtype, shape, "sigmoid_gate x");
  check_view(in.w, dtype, shape, "sigmoid_gate w");
  check_view(dout.y, dtype, shape, "sigmoid_gate dy");
  check_view(grads.x, dtype, shape, "sigmoid_gate dx");
  check_view(grads.w, dtype, shape, "sigmoid_gate dw");
  OpScope op(ctx, "sigmoid_gate", Pass::backward, costs(d, dtype, Pass::backward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::backward(ctx.stream(), d, in, dout, grads);
  cpu::backward(d, in, dout, grads);
}

}  // namespace tessera::ops::sigmoid_gate
