// Checks, costs and the choice of back end.
#include "ops/mla/op.h"

#include "ops/mla/cpu.h"
#include "ops/mla/cuda.h"

namespace tessera::ops::mla {
namespace {

// The workspace of a call is what the back end takes from an arena: asked of a dry one.
template <class F>
int64_t taken_bytes(F&& allocate) {
  Arena arena = Arena::dry();
  allocate(arena);
  return arena.used();
}

int64_t causal_pairs(const Documents& queries, const Documents& keys) {
  int64_t pairs = 0;
  for (int64_t n = 0; n < queries.count(); ++n) {
    const int64_t length = queries.length(n), before = keys.length(n) - length;
    pairs += length * before + length * (length + 1) / 2;
  }
  return pairs;
}

Costs decode_costs(const Dims& d, const DecodeInputs& in, Device back_end) {
  const int64_t rank = in.kv_b.dim(1), width = rank + d.rope_dim, element = bytes_of(in.q.dtype());
  int64_t keys = 0;
  for (const View& latent : in.latent) keys += latent.dim(0);
  const int64_t up = d.tokens * d.heads * rank * (d.nope_dim + d.value_dim);
  return {
      .gemm_flops = 2 * up + 2 * d.heads * keys * (width + rank),
      .vector_flops = 8 * d.heads * keys,
      .bytes_moved = (keys * width + in.kv_b.elements() + in.q.elements() + d.tokens * d.heads * d.value_dim) * element,
      .workspace_bytes = taken_bytes([&](Arena& arena) {
        if (back_end == Device::cuda) {
          cuda::allocate_decode(arena, d, in);
        } else {
          cpu::allocate_decode(arena, d, in);
        }
      })};
}

// Checked; with key_documents in any case.
Inputs checked(const Dims& d, Inputs in) {
  const DType dtype = in.q.dtype();
  in.documents.check(d.tokens);
  if (in.key_documents.present()) {
    in.key_documents.check(in.kv.rows());
    TESSERA_CHECK(in.key_documents.count() == in.documents.count(), "mla: queries of {} documents, keys of {}",
                  in.documents.count(), in.key_documents.count());
    for (int64_t n = 0; n < in.documents.count(); ++n) {
      TESSERA_CHECK(in.documents.length(n) <= in.key_documents.length(n),
                    "mla document {}: {} queries, {} keys, wanted a key for each query", n, in.documents.length(n),
                    in.key_documents.length(n));
    }
  } else {
    in.key_documents = in.documents;
  }
  const int64_t keys = in.key_documents.tokens();
  check_view(in.q, dtype, {d.tokens, d.heads, d.nope_dim + d.rope_dim}, "mla q");
  check_view(in.kv, dtype, {keys, d.heads, d.nope_dim + d.value_dim}, "mla kv");
  check_strided_view(in.k_shared, dtype, {keys, d.rope_dim}, "mla k_shared");
  return in;
}

}  // namespace

Costs costs(const Dims& d, const Documents& documents, DType dtype, Pass pass, Device back_end, const Documents& keys) {
  const Documents& key_documents = keys.present() ? keys : documents;
  const int64_t element = bytes_of(dtype), exact = bytes_of(exact_type(dtype)), rows = d.tokens * d.heads;
  const Flops pairs = Flops{d.heads} * causal_pairs(documents, key_documents);
  const int64_t dk = d.key_dim(), dv = d.value_dim, key_tokens = key_documents.tokens();
  const int64_t inputs = rows * dk + key_tokens * (d.heads * (d.nope_dim + dv) + d.rope_dim);
  if (pass == Pass::forward) {
    return {.gemm_flops = pairs * 2 * (dk + dv),
            .vector_flops = pairs * 8,
            .bytes_moved = (inputs + rows * dv) * element + rows * exact,
            .saved_bytes = Arena::aligned(rows * exact),
            .workspace_bytes = taken_bytes([&](Arena& arena) {
              if (back_end != Device::cuda) cpu::allocate_forward(arena, d, documents, dtype);
            })};
  }
  return {.gemm_flops = pairs * 2 * (3 * dk + 2 * dv),  // S, dq, dk; dP, dv
          .vector_flops = pairs * 10 + rows * 2 * dv,
          .bytes_moved = (2 * inputs + 2 * rows * dv) * element + rows * exact,
          .workspace_bytes = taken_bytes([&](Arena& arena) {
            if (back_end == Device::cuda) {
              cuda::allocate_backward(arena, d, key_tokens, documents.count());
            } else {
              cpu::allocate_backward(arena, d, dtype);
            }
          })};
}

Saved allocate_saved(Context& ctx, const Dims& d, DType dtype) {
  return {ctx.arena.allocate(exact_type(dtype), {d.tokens, d.heads})};
}

void forward(Context& ctx, const Dims& d, const Inputs& inputs, const Outputs& out, Saved* saved) {
  const Inputs in = checked(d, inputs);
  const DType dtype = in.q.dtype();
  check_view(out.o, dtype, {d.tokens, d.heads, d.value_dim}, "mla o");
  if (out.max_logit.present()) check_view(out.max_logit, exact_type(dtype), {d.heads}, "mla max_logit");
  if (saved != nullptr) check_view(saved->lse, exact_type(dtype), {d.tokens, d.heads}, "mla lse");
  OpScope op(ctx, "mla", Pass::forward, costs(d, in.documents, dtype, Pass::forward, ctx.back_end(), in.key_documents));
  if (ctx.back_end() == Device::cuda) {
    cuda::check_dims(d, dtype);
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out, saved);
    return;
  }
  const cpu::ForwardWorkspace workspace = cpu::allocate_forward(ctx.arena, d, in.documents, dtype);
  if (ctx.dry()) return;
  cpu::forward(d, in, out, saved, workspace);
}

void backward(Context& ctx, const Dims& d, const Inputs& inputs, const Outputs& out, const Saved& saved,
              const OutputGrads& dout, const Grads& grads) {
  const Inputs in = checked(d, inputs);
  const DType dtype = in.q.dtype();
  check_view(out.o, dtype, {d.tokens, d.heads, d.value_dim}, "mla o");
  check_view(saved.lse, exact_type(dtype), {d.tokens, d.heads}, "mla lse");
  check_view(dout.o, dtype, {d.tokens, d.heads, d.value_dim}, "mla do");
  check_view(grads.q, dtype, in.q.shape(), "mla dq");
  check_view(grads.kv, dtype, in.kv.shape(), "mla dkv");
  check_strided_view(grads.k_shared, dtype, in.k_shared.shape(), "mla dk_shared");
  OpScope op(ctx, "mla", Pass::backward,
             costs(d, in.documents, dtype, Pass::backward, ctx.back_end(), in.key_documents));
  if (ctx.back_end() == Device::cuda) {
    cuda::check_dims(d, dtype);
    const cuda::BackwardWorkspace workspace =
        cuda::allocate_backward(ctx.arena, d, in.key_documents.tokens(), in.documents.count());
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, out, saved, dout, grads, workspace);
    return;
  }
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
  OpScope op(ctx, "mla_decode", Pass::forward, decode_costs(d, in, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    cuda::check_decode_dims(d, rank, dtype);
    const cuda::DecodeWorkspace workspace = cuda::allocate_decode(ctx.arena, d, in);
    if (!ctx.dry()) cuda::decode(ctx.stream(), d, in, o, workspace);
    return;
  }
  const cpu::DecodeWorkspace workspace = cpu::allocate_decode(ctx.arena, d, in);
  if (ctx.dry()) return;
  cpu::decode(d, in, o, workspace);
}

}  // namespace tessera::ops::mla
