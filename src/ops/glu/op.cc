// Checks, costs and the choice of back end.
#include "ops/glu/op.h"

#include "ops/glu/cpu.h"
#include "ops/glu/cuda.h"
#include "ops/glu/math.h"

namespace tessera::ops::glu {

Costs costs(const Dims& d, DType dtype, Pass pass) {
  const int64_t n = d.rows * d.width;
  if (pass == Pass::forward) {
    return {.vector_flops = value_flops(d.activation) * n, .bytes_moved = 3 * n * bytes_of(dtype)};
  }
  return {.vector_flops = derivative_flops(d.activation) * n, .bytes_moved = 5 * n * bytes_of(dtype)};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.gate.dtype();
  const Shape shape{d.rows, d.width};
  check_activation(d.activation);
  check_strided_view(in.gate, dtype, shape, "glu gate");
  check_strided_view(in.up, dtype, shape, "glu up");
  check_strided_view(out.h, dtype, shape, "glu h");
  OpScope op(ctx, "glu", Pass::forward, costs(d, dtype, Pass::forward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out);
  cpu::forward(d, in, out);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = in.gate.dtype();
  const Shape shape{d.rows, d.width};
  check_activation(d.activation);
  check_strided_view(in.gate, dtype, shape, "glu gate");
  check_strided_view(in.up, dtype, shape, "glu up");
  check_strided_view(dout.h, dtype, shape, "glu dh");
  check_strided_view(grads.gate, dtype, shape, "glu dgate");
  check_strided_view(grads.up, dtype, shape, "glu dup");
  OpScope op(ctx, "glu", Pass::backward, costs(d, dtype, Pass::backward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::backward(ctx.stream(), d, in, dout, grads);
  cpu::backward(d, in, dout, grads);
}

}  // namespace tessera::ops::glu
