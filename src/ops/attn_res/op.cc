// Checks, costs and the choice of back end.
#include "ops/attn_res/op.h"

#include "ops/attn_res/cpu.h"

namespace tessera::ops::attn_res {
namespace {

void check_inputs(const Dims& d, const Inputs& in) {
  const DType dtype = in.query.dtype();
  TESSERA_CHECK(d.sources >= 1 && static_cast<int64_t>(in.sources.size()) == d.sources,
                "attn_res has {} sources, wanted {} (at least 1)", in.sources.size(), d.sources);
  for (const View& v : in.sources) check_view(v, dtype, {d.tokens, d.width}, "attn_res source");
  check_view(in.query, dtype, {d.width}, "attn_res query");
  check_view(in.gain, dtype, {d.width}, "attn_res gain");
}

void check_saved(const Dims& d, DType dtype, const Saved& saved) {
  check_view(saved.alpha, dtype, {d.tokens, d.sources}, "attn_res alpha");
  check_view(saved.rrms, dtype, {d.tokens, d.sources}, "attn_res rrms");
  check_view(saved.score, dtype, {d.tokens, d.sources}, "attn_res score");
}

}  // namespace

Costs costs(const Dims& d, DType dtype, Pass pass) {
  const int64_t n = d.tokens * d.width, scalars = d.tokens * d.sources, element = bytes_of(dtype);
  const int64_t folded = Arena::aligned(d.width * element);
  if (pass == Pass::forward) {
    return {.vector_flops = 6 * n * d.sources,
            .bytes_moved = (n * (d.sources + 1) + 2 * d.width + 3 * scalars) * element,
            .saved_bytes = 3 * Arena::aligned(scalars * element),
            .workspace_bytes = folded};
  }
  return {.vector_flops = n * (10 * d.sources + 2),
          .bytes_moved = (n * (3 * d.sources + 2) + 6 * d.width + 3 * scalars) * element,
          .workspace_bytes = folded + Arena::aligned(cpu::kPartials * d.width * element)};
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  const Shape shape{d.tokens, d.sources};
  return {ctx.arena.allocate(dtype, shape), ctx.arena.allocate(dtype, shape), ctx.arena.allocate(dtype, shape)};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.query.dtype();
  check_inputs(d, in);
  check_view(out.h, dtype, {d.tokens, d.width}, "attn_res h");
  if (saved != nullptr) check_saved(d, dtype, *saved);
  OpScope op(ctx, "attn_res", Pass::forward, costs(d, dtype, Pass::forward));
  const View folded = ctx.arena.allocate(dtype, {d.width});
  if (ctx.dry()) return;
  cpu::forward(d, in, out, saved, folded);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved,
              const OutputGrads& dout, const Grads& grads) {
  const DType dtype = in.query.dtype();
  check_inputs(d, in);
  check_saved(d, dtype, saved);
  check_view(out.h, dtype, {d.tokens, d.width}, "attn_res h");
  check_view(dout.h, dtype, {d.tokens, d.width}, "attn_res dh");
  TESSERA_CHECK(static_cast<int64_t>(grads.sources.size()) == d.sources, "attn_res has {} source gradients, wanted {}",
                grads.sources.size(), d.sources);
  for (const View& v : grads.sources) check_view(v, dtype, {d.tokens, d.width}, "attn_res dsource");
  check_view(grads.query, dtype, {d.width}, "attn_res dquery");
  check_view(grads.gain, dtype, {d.width}, "attn_res dgain");
  OpScope op(ctx, "attn_res", Pass::backward, costs(d, dtype, Pass::backward));
  const View folded = ctx.arena.allocate(dtype, {d.width});
  const View partials = ctx.arena.allocate(dtype, {cpu::kPartials, d.width});
  if (ctx.dry()) return;
  cpu::backward(d, in, saved, dout, grads, folded, partials);
}

}  // namespace tessera::ops::attn_res
