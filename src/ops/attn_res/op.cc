// Checks, costs and the choice of back end.
#include "ops/attn_res/op.h"

#include "ops/attn_res/cpu.h"
#include "ops/attn_res/cuda.h"

namespace tessera::ops::attn_res {
namespace {

void check_inputs(const Dims& d, DType dtype, const Inputs& in) {
  TESSERA_CHECK(d.sources >= 1 && static_cast<int64_t>(in.sources.size()) == d.sources,
                "attn_res has {} sources, wanted {} (at least 1)", in.sources.size(), d.sources);
  for (const View& v : in.sources) check_view(v, dtype, {d.tokens, d.width}, "attn_res source");
  check_view(in.query, exact_type(dtype), {d.width}, "attn_res query");
  check_view(in.gain, exact_type(dtype), {d.width}, "attn_res gain");
}

void check_saved(const Dims& d, DType dtype, const Saved& saved) {
  for (const View& v : {saved.alpha, saved.rrms, saved.score}) {
    check_view(v, exact_type(dtype), {d.tokens, d.sources}, "attn_res alpha, rrms or score");
  }
}

}  // namespace

static int64_t partial_count(const Dims& d, Device back_end) {
  return back_end == Device::cuda ? cuda::partial_count(d) : cpu::kPartials;
}

Costs costs(const Dims& d, DType dtype, Pass pass, Device back_end) {
  const int64_t n = d.tokens * d.width, scalars = d.tokens * d.sources, element = bytes_of(dtype);
  const int64_t exact = bytes_of(exact_type(dtype));
  // q = gain o query; a block of the GPU has it in registers
  const int64_t folded = back_end == Device::cuda ? 0 : Arena::aligned(d.width * exact);
  if (pass == Pass::forward) {
    return {.vector_flops = 6 * n * d.sources,
            .bytes_moved = n * (d.sources + 1) * element + (2 * d.width + 3 * scalars) * exact,
            .saved_bytes = 3 * Arena::aligned(scalars * exact),
            .workspace_bytes = folded};
  }
  return {.vector_flops = n * (10 * d.sources + 2),
          .bytes_moved = n * (3 * d.sources + 2) * element + (6 * d.width + 3 * scalars) * exact,
          .workspace_bytes = folded + Arena::aligned(partial_count(d, back_end) * d.width * exact)};
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  const Shape shape{d.tokens, d.sources};
  const DType exact = exact_type(dtype);
  return {ctx.arena.allocate(exact, shape), ctx.arena.allocate(exact, shape), ctx.arena.allocate(exact, shape)};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = out.h.dtype(), exact = exact_type(dtype);
  check_inputs(d, dtype, in);
  check_view(out.h, dtype, {d.tokens, d.width}, "attn_res h");
  if (saved != nullptr) check_saved(d, dtype, *saved);
  OpScope op(ctx, "attn_res", Pass::forward, costs(d, dtype, Pass::forward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out, saved);
    return;
  }
  const View folded = ctx.arena.allocate(exact, {d.width});
  if (ctx.dry()) return;
  cpu::forward(d, in, out, saved, folded);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved,
              const OutputGrads& dout, const Grads& grads) {
  const DType dtype = out.h.dtype(), exact = exact_type(dtype);
  check_inputs(d, dtype, in);
  check_saved(d, dtype, saved);
  check_view(out.h, dtype, {d.tokens, d.width}, "attn_res h");
  check_view(dout.h, dtype, {d.tokens, d.width}, "attn_res dh");
  TESSERA_CHECK(static_cast<int64_t>(grads.sources.size()) == d.sources, "attn_res has {} source gradients, wanted {}",
                grads.sources.size(), d.sources);
  for (const View& v : grads.sources) check_view(v, dtype, {d.tokens, d.width}, "attn_res dsource");
  check_view(grads.query, exact, {d.width}, "attn_res dquery");
  check_view(grads.gain, exact, {d.width}, "attn_res dgain");
  OpScope op(ctx, "attn_res", Pass::backward, costs(d, dtype, Pass::backward, ctx.back_end()));
  const View partials = ctx.arena.allocate(exact, {partial_count(d, ctx.back_end()), d.width});
  if (ctx.back_end() == Device::cuda) {
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, saved, dout, grads, partials);
    return;
  }
  const View folded = ctx.arena.allocate(exact, {d.width});
  if (ctx.dry()) return;
  cpu::backward(d, in, saved, dout, grads, folded, partials);
}

}  // namespace tessera::ops::attn_res
