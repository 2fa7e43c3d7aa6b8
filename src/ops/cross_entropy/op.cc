// Checks, costs and the choice of back end.
#include "ops/cross_entropy/op.h"

#include <algorithm>

#include "ops/cross_entropy/cpu.h"
#include "ops/cross_entropy/cuda.h"
#include "ops/gemm/cuda.h"

namespace tessera::ops::cross_entropy {
namespace {

int64_t rows_of_block(const Dims& d) { return std::min(d.block_rows, d.tokens); }

// Of the largest product a block makes; float64 runs are proofs: their operands are never rounded.
int64_t scratch_bytes(const Dims& d, DType dtype, Pass pass, Product product) {
  if (dtype != DType::f32) return 0;
  const int64_t n = rows_of_block(d);
  const int64_t logits = gemm_scratch_bytes(product, n, d.vocabulary, d.width);
  if (pass == Pass::forward) return logits;
  return std::max({logits, gemm_scratch_bytes(product, n, d.width, d.vocabulary),
                   gemm_scratch_bytes(product, d.vocabulary, d.width, n)});
}

void check_inputs(const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.x.dtype();
  TESSERA_CHECK(d.block_rows >= 1, "cross_entropy block of {} rows, wanted at least 1", d.block_rows);
  check_view(in.x, dtype, {d.tokens, d.width}, "cross_entropy x");
  check_view(in.weight, dtype, {d.vocabulary, d.width}, "cross_entropy weight");
  check_view(in.targets, DType::i32, {d.tokens}, "cross_entropy targets");
  check_view(out.loss, exact_type(dtype), {d.tokens}, "cross_entropy loss");
}

// Logits of a block, and what its products need.
struct Workspace {
  View logits, products;
};

int64_t products_bytes(const Dims& d, DType dtype, Pass pass, Product product, Device back_end) {
  return back_end == Device::cuda ? kGemmWorkspaceBytes : scratch_bytes(d, dtype, pass, product);
}

Workspace allocate_workspace(Context& ctx, const Dims& d, DType dtype, Pass pass) {
  return {ctx.arena.allocate(exact_type(dtype), {rows_of_block(d), d.vocabulary}),
          ctx.arena.allocate(DType::u8, {products_bytes(d, dtype, pass, ctx.product, ctx.back_end())})};
}

}  // namespace

// The logits count as moved: a block of them is written by one product and read back from memory.
Costs costs(const Dims& d, DType dtype, Pass pass, Product product, Device back_end) {
  const int64_t x = d.tokens * d.width, weight = d.vocabulary * d.width, logits = d.tokens * d.vocabulary;
  const int64_t element = bytes_of(dtype), exact = bytes_of(exact_type(dtype));
  const int64_t per_token = d.tokens * (exact + bytes_of(DType::i32));
  Costs c;
  c.workspace_bytes =
      Arena::aligned(rows_of_block(d) * d.vocabulary * exact) + products_bytes(d, dtype, pass, product, back_end);
  if (pass == Pass::forward) {
    c.gemm_flops = 2 * logits * d.width;
    c.vector_flops = 4 * logits;
    c.bytes_moved = (x + weight) * element + 2 * logits * exact + per_token;
  } else {
    c.gemm_flops = 6 * logits * d.width;
    c.vector_flops = 5 * logits;
    c.bytes_moved = (2 * x + weight + 3 * logits) * element + (2 * weight + 2 * logits) * exact + per_token;
  }
  return c;
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out) {
  const DType dtype = in.x.dtype();
  check_inputs(d, in, out);
  OpScope op(ctx, "cross_entropy", Pass::forward, costs(d, dtype, Pass::forward, ctx.product, ctx.back_end()));
  const Workspace w = allocate_workspace(ctx, d, dtype, Pass::forward);
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) return cuda::forward(ctx.stream(), d, in, out, {w.logits, w.products});
  cpu::forward(d, in, out, ctx.product, {w.logits, w.products});
}

void forward_backward(Context& ctx, const Dims& d, const Inputs& in, double scale, const Outputs& out,
                      const Grads& grads) {
  const DType dtype = in.x.dtype();
  check_inputs(d, in, out);
  check_view(grads.x, dtype, {d.tokens, d.width}, "cross_entropy dx");
  check_view(grads.weight, exact_type(dtype), {d.vocabulary, d.width}, "cross_entropy dweight");
  OpScope op(ctx, "cross_entropy", Pass::backward, costs(d, dtype, Pass::backward, ctx.product, ctx.back_end()));
  const Workspace w = allocate_workspace(ctx, d, dtype, Pass::backward);
  if (ctx.dry()) return;
  if (ctx.device == Device::cuda) {
    return cuda::forward_backward(ctx.stream(), d, in, scale, out, grads, {w.logits, w.products});
  }
  cpu::forward_backward(d, in, scale, out, grads, ctx.product, {w.logits, w.products});
}

}  // namespace tessera::ops::cross_entropy
