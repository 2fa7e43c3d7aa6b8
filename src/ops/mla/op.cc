// Checks, costs and the choice of back end.
#include "ops/mla/op.h"

#include "ops/mla/cpu.h"

namespace tessera::ops::mla {
namespace {

// The workspace of a call is what the back end takes from an arena: asked of a dry one.
template <class F>
int64_t taken_bytes(F&& allocate) {
  Arena arena = Arena::dry();
  allocate(arena);
  return arena.used();
}

int64_t causal_pairs(const Documents& documents) {
  int64_t pairs = 0;
  for (int64_t n = 0; n < documents.count(); ++n) pairs += documents.length(n) * (documents.length(n) + 1) / 2;
  return pairs;
}

Costs decode_costs(const Dims& d, const DecodeInputs& in) {
  const int64_t rank = in.kv_b.dim(1), width = rank + d.rope_dim, element = bytes_of(in.q.dtype());
  int64_t keys = 0;
  for (const View& latent : in.latent) keys += latent.dim(0);
  const int64_t up = d.tokens * d.heads * rank * (d.nope_dim + d.value_dim);
  return {
      .gemm_flops = 2 * up + 2 * d.heads * keys * (width + rank),
      .vector_flops = 8 * d.heads * keys,
      .bytes_moved = (keys * width + in.kv_b.elements() + in.q.elements() + d.tokens * d.heads * d.value_dim) * element,
      .workspace_bytes = taken_bytes([&](Arena& arena) { cpu::allocate_decode(arena, d, in); })};
}

void check_inputs(const Dims& d, const Inputs& in) {
  const DType dtype = in.q.dtype();
  check_view(in.q, dtype, {d.tokens, d.heads, d.nope_dim + d.rope_dim}, "mla q");
  check_view(in.kv, dtype, {d.tokens, d.heads, d.nope_dim + d.value_dim}, "mla kv");
  check_strided_view(in.k_shared, dtype, {d.tokens, d.rope_dim}, "mla k_shared");
  in.documents.check(d.tokens);
}

}  // namespace

Costs costs(const Dims& d, const Documents& documents, DType dtype, Pass pass) {
  const int64_t element = bytes_of(dtype), rows = d.tokens * d.heads;
  const Flops pairs = Flops{d.heads} * causal_pairs(documents);
  const int64_t dk = d.nope_dim + d.rope_dim, dv = d.value_dim;
  const int64_t inputs = rows * (dk + d.nope_dim + dv) + d.tokens * d.rope_dim;
  if (pass == Pass::forward) {
    return {.gemm_flops = pairs * 2 * (dk + dv),
            .vector_flops = pairs * 8,
            .bytes_moved = (inputs + rows * dv + rows) * element,
            .saved_bytes = Arena::aligned(rows * element),
            .workspace_bytes = taken_bytes([&](Arena& arena) { cpu::allocate_forward(arena, d, documents, dtype); })};
  }
  return {.gemm_flops = pairs * 2 * (3 * dk + 2 * dv),  // S, dq, dk; dP, dv
          .vector_flops = pairs * 10 + rows * 2 * dv,
          .bytes_moved = (2 * inputs + 2 * rows * dv + rows) * element,
          .workspace_bytes = taken_bytes([&](Arena& arena) { cpu::allocate_backward(arena, d, dtype); })};
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  return {ctx.arena.allocate(dtype, {d.tokens, d.heads})};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.q.dtype();
  check_inputs(d, in);
  check_view(out.o, dtype, {d.tokens, d.heads, d.value_dim}, "mla o");
  if (out.max_logit.present()) check_view(out.max_logit, dtype, {d.heads}, "mla max_logit");
  if (saved != nullptr) check_view(saved->lse, dtype, {d.tokens, d.heads}, "mla lse");
  OpScope op(ctx, "mla", Pass::forward, costs(d, in.documents, dtype, Pass::forward));
  const cpu::ForwardWorkspace workspace = cpu::allocate_forward(ctx.arena, d, in.documents, dtype);
  if (ctx.dry()) return;
  cpu::forward(d, in, out, saved, workspace);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved,
              const OutputGrads& dout, const Grads& grads) {
  const DType dtype = in.q.dtype();
  check_inputs(d, in);
  check_view(out.o, dtype, {d.tokens, d.heads, d.value_dim}, "mla o");
  check_view(saved.lse, dtype, {d.tokens, d.heads}, "mla lse");
  check_view(dout.o, dtype, {d.tokens, d.heads, d.value_dim}, "mla do");
  check_view(grads.q, dtype, in.q.shape(), "mla dq");
  check_view(grads.kv, dtype, in.kv.shape(), "mla dkv");
  check_strided_view(grads.k_shared, dtype, {d.tokens, d.rope_dim}, "mla dk_shared");
  OpScope op(ctx, "mla", Pass::backward, costs(d, in.documents, dtype, Pass::backward));
  const cpu::BackwardWorkspace workspace = cpu::allocate_backward(ctx.arena, d, dtype);
  if (ctx.dry()) return;
  cpu::backward(d, in, out, saved, dout, grads, workspace);
}

void decode(Context& ctx, const Dims& d, const DecodeInputs& in, const View& o) {
  const DType dtype = in.q.dtype();
  check_view(in.q, dtype, {d.tokens, d.heads, d.nope_dim + d.rope_dim}, "mla decode q");
  TESSERA_CHECK(in.kv_b.rank() == 2, "mla decode kv_b must have rank 2, found {}", in.kv_b.shape().to_string());
  const int64_t rank = in.kv_b.dim(1);
  check_view(in.kv_b, dtype, {d.heads * (d.nope_dim + d.value_dim), rank}, "mla decode kv_b");
  TESSERA_CHECK(static_cast<int64_t>(in.latent.size()) == d.tokens, "mla decode: {} queries, {} caches", d.tokens,
                in.latent.size());
  for (const View& latent : in.latent) {
    TESSERA_CHECK(latent.rows() > 0, "mla decode: a cache must hold at least the query's own token");
    check_strided_view(latent, dtype, {latent.rows(), rank + d.rope_dim}, "mla decode latent");
  }
  check_view(o, dtype, {d.tokens, d.heads, d.value_dim}, "mla decode o");
  OpScope op(ctx, "mla_decode", Pass::forward, decode_costs(d, in));
  const cpu::DecodeWorkspace workspace = cpu::allocate_decode(ctx.arena, d, in);
  if (ctx.dry()) return;
  cpu::decode(d, in, o, workspace);
}

}  // namespace tessera::ops::mla
