// Checks, costs and the choice of back end.
#include "ops/rms_norm/op.h"

#include "ops/rms_norm/cpu.h"
#include "ops/rms_norm/cuda.h"

namespace tessera::ops::rms_norm {

static int64_t partial_count(Device back_end) { return back_end == Device::cuda ? cuda::kPartials : cpu::kPartials; }

Costs costs(const Dims& d, DType dtype, Pass pass, Device back_end) {
  const int64_t n = d.rows * d.width, element = bytes_of(dtype), exact = bytes_of(exact_type(dtype));
  if (pass == Pass::forward) {
    return {.vector_flops = 4 * n,
            .bytes_moved = (2 * n + d.width) * element,
            .saved_bytes = Arena::aligned(d.rows * exact)};
  }
  return {.vector_flops = 9 * n,
          .bytes_moved = (3 * n + 2 * d.width + d.rows) * element,
          .workspace_bytes = Arena::aligned(partial_count(back_end) * d.width * exact)};
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  return {ctx.arena.allocate(exact_type(dtype), {d.rows})};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.x.dtype(), exact = exact_type(dtype);
  check_strided_view(in.x, dtype, {d.rows, d.width}, "rms_norm x");
  check_view(in.weight, exact, {d.width}, "rms_norm weight");
  check_strided_view(out.y, dtype, {d.rows, d.width}, "rms_norm y");
  if (saved != nullptr) check_view(saved->rstd, exact, {d.rows}, "rms_norm rstd");
  OpScope op(ctx, "rms_norm", Pass::forward, costs(d, dtype, Pass::forward, ctx.back_end()));
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out, saved);
  cpu::forward(d, in, out, saved);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads) {
  const DType dtype = in.x.dtype(), exact = exact_type(dtype);
  check_strided_view(in.x, dtype, {d.rows, d.width}, "rms_norm x");
  check_view(saved.rstd, exact, {d.rows}, "rms_norm rstd");
  check_strided_view(dout.y, dtype, {d.rows, d.width}, "rms_norm dy");
  check_strided_view(grads.x, dtype, {d.rows, d.width}, "rms_norm dx");
  check_view(grads.weight, exact, {d.width}, "rms_norm dweight");
  OpScope op(ctx, "rms_norm", Pass::backward, costs(d, dtype, Pass::backward, ctx.back_end()));
  const View partials = ctx.arena.allocate(exact, {partial_count(ctx.back_end()), d.width});
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::backward(ctx.stream(), d, in, saved, dout, grads, partials);
  cpu::backward(d, in, saved, dout, grads, partials);
}

}  // namespace tessera::ops::rms_norm
