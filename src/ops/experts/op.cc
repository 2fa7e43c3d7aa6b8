// Checks, costs and the choice of back end.
#include "ops/experts/op.h"

#include "ops/experts/cpu.h"
#include "ops/experts/cuda.h"
#include "ops/experts/plan.h"
#include "ops/glu/math.h"

namespace tessera::ops::experts {
namespace {

void check_inputs(const Dims& d, DType dtype, const Inputs& in) {
  glu::check_activation(d.activation);
  const Shape selected{d.tokens, d.top_k}, up{d.experts, d.hidden, d.width}, down{d.experts, d.width, d.hidden};
  check_strided_view(in.x, dtype, {d.tokens, d.width}, "experts x");
  check_view(in.indices, DType::i32, selected, "experts indices");
  check_view(in.weights, exact_type(dtype), selected, "experts weights");
  check_view(in.w1, dtype, up, "experts w1");
  check_view(in.w3, dtype, up, "experts w3");
  check_view(in.w2, dtype, down, "experts w2");
}

void check_saved(const Context& ctx, const Dims& d, DType dtype, const Saved& saved) {
  const bool cuda = ctx.back_end() == Device::cuda;
  const int64_t rows = cuda ? cuda::row_capacity(d) : rows_of(d);
  check_view(saved.slots, DType::i64, {rows}, "experts slots");
  check_view(saved.offsets, DType::i64, {d.experts + 1}, "experts offsets");
  check_view(saved.gate, dtype, {rows, d.hidden}, "experts gate");
  check_view(saved.up, dtype, {rows, d.hidden}, "experts up");
  if (!cuda) return;
  check_view(saved.rows, DType::i64, {rows_of(d)}, "experts rows");
  check_view(saved.counts, DType::i64, {d.experts}, "experts counts");
  check_view(saved.blocks, DType::i32, {rows / cuda::kBlockRows}, "experts blocks");
}

struct Scratch {
  View reals, bytes;
};

Scratch allocate_scratch(Context& ctx, const Dims& d, DType dtype, Pass pass) {
  const int64_t reals = scratch_reals(d, pass, row_unit(dtype, ctx.product));
  return {ctx.arena.allocate(dtype, {thread_count(), reals}),
          ctx.arena.allocate(DType::u8, {thread_count(), scratch_bytes(d, dtype, ctx.product)})};
}

int64_t scratch_costs(const Dims& d, DType dtype, Pass pass, Product product) {
  return Arena::aligned(thread_count() * scratch_reals(d, pass, row_unit(dtype, product)) * bytes_of(dtype)) +
         Arena::aligned(thread_count() * scratch_bytes(d, dtype, product));
}

}  // namespace

// As the CPU's, with the memory of the GPU.
static Costs cuda_costs(const Dims& d, DType dtype, Pass pass, Product product) {
  Costs c = costs(d, dtype, pass, product);
  Arena saved = Arena::dry(), workspace = Arena::dry();
  if (pass == Pass::forward) {
    cuda::allocate_saved(saved, d, dtype);
    cuda::allocate_forward(workspace, d, dtype);
  } else {
    cuda::allocate_backward(workspace, d, dtype);
  }
  c.saved_bytes = saved.used();
  c.workspace_bytes = workspace.used();
  return c;
}

Costs costs(const Dims& d, DType dtype, Pass pass, Product product, Device back_end) {
  if (back_end == Device::cuda) return cuda_costs(d, dtype, pass, product);
  const int64_t rows = rows_of(d), L = d.width, F = d.hidden, element = bytes_of(dtype), word = bytes_of(DType::i64);
  const int64_t weights = 3 * d.experts * F * L, by_slot = Arena::aligned(rows * L * element);
  if (pass == Pass::forward) {
    return {.gemm_flops = 6 * rows * L * F,
            .vector_flops = rows * (glu::value_flops(d.activation) * F + 2 * L),
            .bytes_moved = (weights + 2 * d.tokens * L + rows + 2 * rows * F) * element + rows * (4 + word),
            .saved_bytes = Arena::aligned(rows * word) + Arena::aligned((d.experts + 1) * word) +
                           2 * Arena::aligned(rows * F * element),
            .workspace_bytes =
                2 * Arena::aligned((d.experts + 1) * word) + by_slot + scratch_costs(d, dtype, pass, product)};
  }
  return {.gemm_flops = 12 * rows * L * F,
          .vector_flops = rows * (glu::derivative_flops(d.activation) * F + L),
          .bytes_moved = (3 * weights + 3 * d.tokens * L + 2 * rows + 2 * rows * F) * element + rows * (4 + word),
          .workspace_bytes = Arena::aligned(max_items(d) * 4 * word) +
                             Arena::aligned(max_partials(d) * 3 * F * L * element) + by_slot +
                             scratch_costs(d, dtype, pass, product)};
}

static Costs forward_costs(const Dims& d, DType dtype, const Context& ctx, const Outputs& out) {
  Costs c = costs(d, dtype, Pass::forward, ctx.product, ctx.back_end());
  if (out.squares.present()) {
    c.vector_flops += 2 * rows_of(d) * d.width;
    c.bytes_moved += rows_of(d) * d.width * bytes_of(dtype);
  }
  return c;
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  Arena& arena = ctx.arena;
  if (ctx.back_end() == Device::cuda) return cuda::allocate_saved(arena, d, dtype);
  return {.slots = arena.allocate(DType::i64, {rows_of(d)}),
          .offsets = arena.allocate(DType::i64, {d.experts + 1}),
          .gate = arena.allocate(dtype, {rows_of(d), d.hidden}),
          .up = arena.allocate(dtype, {rows_of(d), d.hidden}),
          .rows = {},
          .counts = {},
          .blocks = {}};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.x.dtype();
  check_inputs(d, dtype, in);
  check_strided_view(out.y, dtype, {d.tokens, d.width}, "experts y");
  if (out.squares.present()) check_view(out.squares, DType::f64, {d.experts}, "experts squares");
  if (saved != nullptr) check_saved(ctx, d, dtype, *saved);
  OpScope op(ctx, "experts", Pass::forward, forward_costs(d, dtype, ctx, out));
  if (ctx.back_end() == Device::cuda) {
    const Saved kept = saved != nullptr ? *saved : cuda::allocate_saved(ctx.arena, d, dtype);
    const auto workspace = cuda::allocate_forward(ctx.arena, d, dtype);
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out, kept, workspace);
    return;
  }
  const Shape per_expert{d.experts + 1};
  cpu::ForwardWorkspace w;
  w.slots = saved != nullptr ? saved->slots : ctx.arena.allocate(DType::i64, {rows_of(d)});
  w.offsets = saved != nullptr ? saved->offsets : ctx.arena.allocate(DType::i64, per_expert);
  w.cursor = ctx.arena.allocate(DType::i64, per_expert);
  w.blocks = ctx.arena.allocate(DType::i64, per_expert);
  w.y = ctx.arena.allocate(dtype, {rows_of(d), d.width});
  const Scratch scratch = allocate_scratch(ctx, d, dtype, Pass::forward);
  w.reals = scratch.reals;
  w.bytes = scratch.bytes;
  if (ctx.dry()) return;
  cpu::forward(d, ctx.product, in, out, saved, w);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads) {
  const DType dtype = in.x.dtype();
  check_inputs(d, dtype, in);
  check_saved(ctx, d, dtype, saved);
  check_strided_view(dout.y, dtype, {d.tokens, d.width}, "experts dy");
  check_strided_view(grads.x, dtype, {d.tokens, d.width}, "experts dx");
  check_view(grads.weights, exact_type(dtype), {d.tokens, d.top_k}, "experts dweights");
  check_view(grads.w1, exact_type(dtype), in.w1.shape(), "experts dw1");
  check_view(grads.w3, exact_type(dtype), in.w3.shape(), "experts dw3");
  check_view(grads.w2, exact_type(dtype), in.w2.shape(), "experts dw2");
  OpScope op(ctx, "experts", Pass::backward, costs(d, dtype, Pass::backward, ctx.product, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    const auto workspace = cuda::allocate_backward(ctx.arena, d, dtype);
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, saved, dout, grads, workspace);
    return;
  }
  cpu::BackwardWorkspace w;
  w.items = ctx.arena.allocate(DType::i64, {max_items(d), 4});
  w.partials = ctx.arena.allocate(dtype, {max_partials(d), 3 * d.hidden * d.width});
  w.dx = ctx.arena.allocate(dtype, {rows_of(d), d.width});
  const Scratch scratch = allocate_scratch(ctx, d, dtype, Pass::backward);
  w.reals = scratch.reals;
  w.bytes = scratch.bytes;
  if (ctx.dry()) return;
  cpu::backward(d, ctx.product, in, saved, dout, grads, w);
}

}  // namespace tessera::ops::experts
