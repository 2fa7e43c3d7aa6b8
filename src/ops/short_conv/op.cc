// Checks, costs and the choice of back end.
#include "ops/short_conv/op.h"

#include "ops/short_conv/cpu.h"
#include "ops/short_conv/cuda.h"

namespace tessera::ops::short_conv {
namespace {

// Of every document, or of the first.
void check_initial(const Dims& d, const Documents& documents, const View& window, DType dtype, const char* what) {
  const int64_t count = documents.count() > 1 && window.rows() == 1 ? 1 : documents.count();
  check_view(window, dtype, {count, d.width - 1, d.channels}, what);
}

void check_inputs(const Dims& d, const Inputs& in) {
  const DType dtype = in.x.dtype();
  TESSERA_CHECK(d.width >= 1 && d.width <= cpu::kMaxWidth, "short_conv has width {}, wanted 1 to {}", d.width,
                cpu::kMaxWidth);
  check_view(in.x, dtype, {d.tokens, d.channels}, "short_conv x");
  check_view(in.weight, exact_type(dtype), {d.channels, d.width}, "short_conv weight");
  in.documents.check(d.tokens);
  if (in.initial_window.present()) {
    check_initial(d, in.documents, in.initial_window, dtype, "short_conv initial_window");
  }
}

}  // namespace

Costs costs(const Dims& d, DType dtype, Pass pass, Device back_end) {
  const int64_t n = d.tokens * d.channels, w = d.channels * d.width, element = bytes_of(dtype);
  const int64_t exact = bytes_of(exact_type(dtype));
  const bool on_gpu = back_end == Device::cuda;
  if (pass == Pass::forward) {
    return {.vector_flops = n * (2 * d.width + 4),
            .bytes_moved = 2 * n * element + w * exact,
            .workspace_bytes = on_gpu ? 0 : cpu::forward_workspace(d, dtype)};
  }
  return {.vector_flops = n * (6 * d.width + 8),
          .bytes_moved = 3 * n * element + 2 * w * exact,
          .workspace_bytes = on_gpu ? Arena::aligned(cuda::kPartials * w * exact) : cpu::backward_workspace(d, dtype)};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.x.dtype();
  check_inputs(d, in);
  check_view(out.y, dtype, {d.tokens, d.channels}, "short_conv y");
  if (out.final_window.present()) {
    check_view(out.final_window, dtype, {in.documents.count(), d.width - 1, d.channels}, "short_conv final_window");
  }
  OpScope op(ctx, "short_conv", Pass::forward, costs(d, dtype, Pass::forward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out);
    return;
  }
  const cpu::Workspace workspace = cpu::allocate_forward(ctx.arena, d, dtype);
  if (ctx.dry()) return;
  cpu::forward(d, in, out, workspace);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const DType dtype = in.x.dtype();
  check_inputs(d, in);
  check_view(dout.y, dtype, {d.tokens, d.channels}, "short_conv dy");
  check_view(grads.x, dtype, {d.tokens, d.channels}, "short_conv dx");
  check_view(grads.weight, exact_type(dtype), {d.channels, d.width}, "short_conv dweight");
  if (grads.initial_window.present()) {
    check_initial(d, in.documents, grads.initial_window, dtype, "short_conv d initial_window");
  }
  OpScope op(ctx, "short_conv", Pass::backward, costs(d, dtype, Pass::backward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    const View partials = ctx.arena.allocate(exact_type(dtype), {cuda::kPartials, d.width, d.channels});
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, dout, grads, partials);
    return;
  }
  const cpu::Workspace workspace = cpu::allocate_backward(ctx.arena, d, dtype);
  if (ctx.dry()) return;
  cpu::backward(d, in, dout, grads, workspace);
}

}  // namespace tessera::ops::short_conv
