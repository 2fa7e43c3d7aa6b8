// Checks, costs and the choice of back end.
#include "ops/kda/op.h"

#include "core/parallel.h"
#include "ops/kda/cpu.h"

namespace tessera::ops::kda {
namespace {

void check_dims(const Dims& d) {
  TESSERA_CHECK(d.heads >= 1 && d.value_heads >= 1 && d.value_heads % d.heads == 0,
                "kda has {} value heads for {} query heads, wanted a multiple", d.value_heads, d.heads);
  TESSERA_CHECK(d.key_dim >= 1 && d.value_dim >= 1, "kda heads of widths {} and {}", d.key_dim, d.value_dim);
  TESSERA_CHECK(d.chunk == 16 || d.chunk == 32 || d.chunk == 64, "kda chunk of {} tokens, wanted 16, 32 or 64",
                d.chunk);
  TESSERA_CHECK(d.gate == Gate::unbounded || (d.lower_bound >= -5 && d.lower_bound < 0),
                "kda gate bounded by {}, wanted [-5, 0)", d.lower_bound);
}

Shape state_shape(const Dims& d, int64_t n) { return {n, d.value_heads, d.value_dim, d.key_dim}; }

void check_inputs(const Dims& d, const Inputs& in, DType dtype) {
  check_dims(d);
  in.documents.check(d.tokens);
  check_view(in.q, dtype, {d.tokens, d.heads, d.key_dim}, "kda q");
  check_view(in.k, dtype, {d.tokens, d.heads, d.key_dim}, "kda k");
  check_view(in.v, dtype, {d.tokens, d.value_heads, d.value_dim}, "kda v");
  check_view(in.z, dtype, {d.tokens, d.value_heads, d.key_dim}, "kda z");
  check_view(in.beta_logit, dtype, {d.tokens, d.value_heads}, "kda beta_logit");
  TESSERA_CHECK(in.a_log.present() || d.gate == Gate::bounded, "kda a_log is absent with the unbounded gate");
  if (in.a_log.present()) check_view(in.a_log, dtype, {d.value_heads}, "kda a_log");
  check_view(in.dt_bias, dtype, {d.value_heads, d.key_dim}, "kda dt_bias");
  if (in.initial_state.present()) {
    check_view(in.initial_state, dtype, state_shape(d, in.documents.count()), "kda initial_state");
  }
}

void check_saved(const Dims& d, const Saved& saved, int64_t chunks, DType dtype) {
  check_view(saved.inverse, dtype, {chunks, d.value_heads, d.chunk, d.chunk}, "kda saved inverse");
  check_view(saved.states, dtype, state_shape(d, chunks), "kda saved states");
}

void check_grads(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads, DType dtype) {
  check_view(dout.o, dtype, in.v.shape(), "kda do");
  if (dout.final_state.present()) {
    check_view(dout.final_state, dtype, state_shape(d, in.documents.count()), "kda dfinal_state");
  }
  check_view(grads.q, dtype, in.q.shape(), "kda dq");
  check_view(grads.k, dtype, in.k.shape(), "kda dk");
  check_view(grads.v, dtype, in.v.shape(), "kda dv");
  check_view(grads.z, dtype, in.z.shape(), "kda dz");
  check_view(grads.beta_logit, dtype, in.beta_logit.shape(), "kda dbeta_logit");
  TESSERA_CHECK(grads.a_log.present() == in.a_log.present(), "kda a_log and its gradient: one is absent");
  if (grads.a_log.present()) check_view(grads.a_log, dtype, in.a_log.shape(), "kda da_log");
  check_view(grads.dt_bias, dtype, in.dt_bias.shape(), "kda ddt_bias");
  if (grads.initial_state.present()) {
    check_view(grads.initial_state, dtype, state_shape(d, in.documents.count()), "kda dinitial_state");
  }
}

int64_t parts_bytes(const Dims& d) {
  return Arena::aligned((cpu::part_count(d.tokens) + 1) * int64_t{sizeof(cpu::Part)});
}

View allocate_parts(Context& ctx, const Dims& d) {
  return ctx.arena.allocate(DType::i64, {cpu::part_count(d.tokens) + 1, 2});
}

// Multiply-adds of the formulas, times 2, with a chunk's lower triangles counted as triangles (n^2 / 2 for n rows).
//   forward   Kt S0, Qt S0, Kh^T R: 6 K V a token.  The rest as in the Kimi Linear report: C (2 K + V) + C^2.
//   backward  E, Z, dKh, Kh dS1, Qt^T dO, Kt^T Y: 12 K V a token.  P^T dO, dO R^T, M^T dR, Y R^T: 4 C V.
//             xr, xq, xc, xp: 4 C K.  What is made again is not counted.
// `n`, the mean rows of a chunk, stands for C: exact when the chunks are equal, less than the truth when not.
double product_flops(const Dims& d, double n, Pass pass) {
  const double k = double(d.key_dim), v = double(d.value_dim);
  return pass == Pass::forward ? 6 * k * v + n * (2 * k + v) + n * n : 12 * k * v + 4 * n * (k + v);
}

Costs step_costs(const Dims& d, DType dtype) {
  const int64_t states = d.tokens * d.value_heads * d.key_dim * d.value_dim;
  return {.gemm_flops = 6 * states,
          .vector_flops = states,
          .bytes_moved = 2 * states * bytes_of(dtype),
          .workspace_bytes = Arena::aligned(thread_count() * cpu::step_scratch(d) * bytes_of(dtype))};
}

}  // namespace

int64_t chunk_count(const Documents& documents, int64_t chunk) {
  int64_t chunks = 0;
  for (int64_t n = 0; n < documents.count(); ++n) chunks += (documents.length(n) + chunk - 1) / chunk;
  return chunks;
}

Costs costs(const Dims& d, int64_t chunks, DType dtype, Pass pass) {
  const int64_t element = bytes_of(dtype), rows = d.tokens * d.value_heads;
  const double mean = chunks == 0 ? 0.0 : double(d.tokens) / double(chunks);
  const int64_t products = static_cast<int64_t>(double(rows) * product_flops(d, mean, pass));
  const int64_t inverse = chunks * d.value_heads * d.chunk * d.chunk;
  const int64_t states = chunks * d.value_heads * d.value_dim * d.key_dim;
  const int64_t inputs = 2 * d.tokens * d.heads * d.key_dim + rows * (d.value_dim + d.key_dim + 1);
  if (pass == Pass::forward) {
    const int64_t scratch = thread_count() * cpu::forward_scratch(d, dtype);
    return {.gemm_flops = products,
            .vector_flops = rows * (90 * d.key_dim + 5 * d.value_dim),
            .bytes_moved = (inputs + rows * d.value_dim) * element,
            .saved_bytes = Arena::aligned(inverse * element) + Arena::aligned(states * element),
            .workspace_bytes = Arena::aligned(scratch * element) + parts_bytes(d)};
  }
  const int64_t scratch = thread_count() * cpu::backward_scratch(d, dtype);
  const int64_t partials = cpu::part_count(d.tokens) * d.value_heads * cpu::partial_width(d);
  return {.gemm_flops = products,
          .vector_flops = rows * (200 * d.key_dim + 10 * d.value_dim),
          .bytes_moved = (2 * inputs + rows * d.value_dim + inverse + states) * element,
          .workspace_bytes = Arena::aligned(scratch * element) + Arena::aligned(partials * element) + parts_bytes(d)};
}

Saved allocate_saved(Context& ctx, const Dims& d, const Documents& documents, DType dtype) {
  const int64_t chunks = chunk_count(documents, d.chunk);
  return {ctx.arena.allocate(dtype, {chunks, d.value_heads, d.chunk, d.chunk}),
          ctx.arena.allocate(dtype, state_shape(d, chunks))};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.q.dtype();
  check_inputs(d, in, dtype);
  const int64_t chunks = chunk_count(in.documents, d.chunk);
  check_view(out.o, dtype, in.v.shape(), "kda o");
  if (out.final_state.present()) {
    check_view(out.final_state, dtype, state_shape(d, in.documents.count()), "kda final_state");
  }
  if (saved != nullptr) check_saved(d, *saved, chunks, dtype);
  OpScope op(ctx, "kda", Pass::forward, costs(d, chunks, dtype, Pass::forward));
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::forward_scratch(d, dtype)});
  const View parts = allocate_parts(ctx, d);
  if (ctx.dry()) return;
  cpu::forward(d, in, out, saved, scratch, parts);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads) {
  const DType dtype = in.q.dtype();
  check_inputs(d, in, dtype);
  const int64_t chunks = chunk_count(in.documents, d.chunk);
  check_saved(d, saved, chunks, dtype);
  check_grads(d, in, dout, grads, dtype);
  OpScope op(ctx, "kda", Pass::backward, costs(d, chunks, dtype, Pass::backward));
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::backward_scratch(d, dtype)});
  const View partials = ctx.arena.allocate(dtype, {cpu::part_count(d.tokens), d.value_heads, cpu::partial_width(d)});
  const View parts = allocate_parts(ctx, d);
  if (ctx.dry()) return;
  cpu::backward(d, in, saved, dout, grads, scratch, partials, parts);
}

void step(Context& ctx, const Dims& d, const Inputs& in, const View& state, const View& o) {
  const DType dtype = in.q.dtype();
  check_inputs(d, in, dtype);
  TESSERA_CHECK(in.documents.count() == d.tokens, "kda step with {} tokens of {} sequences, wanted one each", d.tokens,
                in.documents.count());
  check_view(state, dtype, state_shape(d, d.tokens), "kda state");
  check_view(o, dtype, in.v.shape(), "kda o");
  OpScope op(ctx, "kda_step", Pass::forward, step_costs(d, dtype));
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::step_scratch(d)});
  if (ctx.dry()) return;
  cpu::step(d, in, state, o, scratch);
}

}  // namespace tessera::ops::kda
