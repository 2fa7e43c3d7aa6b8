// Checks, costs and the choice of back end.
#include "ops/l2_norm/op.h"

#include "ops/l2_norm/cpu.h"
#include "ops/l2_norm/cuda.h"

namespace tessera::ops::l2_norm {

Costs costs(const Dims& d, DType dtype, Pass pass) {
  const int64_t n = d.rows * d.width, element = bytes_of(dtype), exact = bytes_of(exact_type(dtype));
  if (pass == Pass::forward) {
    return {.vector_flops = 3 * n,
            .bytes_moved = 2 * n * element + d.rows * exact,
            .saved_bytes = Arena::aligned(d.rows * exact)};
  }
  return {.vector_flops = 5 * n, .bytes_moved = 3 * n * element + d.rows * exact};
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  return {ctx.arena.allocate(exact_type(dtype), {d.rows})};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.x.dtype();
  check_view(in.x, dtype, {d.rows, d.width}, "l2_norm x");
  check_view(out.y, dtype, {d.rows, d.width}, "l2_norm y");
  if (saved != nullptr) check_view(saved->rnorm, exact_type(dtype), {d.rows}, "l2_norm rnorm");
  OpScope op(ctx, "l2_norm", Pass::forward, costs(d, dtype, Pass::forward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out, saved);
  cpu::forward(d, in, out, saved);
}

void backward(Context& ctx, const Dims& d, const Outputs& out, const Saved& saved, const OutputGrads& dout,
              const Grads& grads) {
  const DType dtype = out.y.dtype();
  check_view(out.y, dtype, {d.rows, d.width}, "l2_norm y");
  check_view(saved.rnorm, exact_type(dtype), {d.rows}, "l2_norm rnorm");
  check_view(dout.y, dtype, {d.rows, d.width}, "l2_norm dy");
  check_view(grads.x, dtype, {d.rows, d.width}, "l2_norm dx");
  OpScope op(ctx, "l2_norm", Pass::backward, costs(d, dtype, Pass::backward));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::backward(ctx.stream(), d, out, saved, dout, grads);
  cpu::backward(d, out, saved, dout, grads);
}

}  // namespace tessera::ops::l2_norm
