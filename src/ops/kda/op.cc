// Checks, costs and the choice of back end.
#include "ops/kda/op.h"

#include "core/parallel.h"
#include "ops/kda/cpu.h"
#include "ops/kda/cuda.h"
#include "ops/kda/cuda_backward.h"

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

// Of the back end beside those of the op: what its kernels are made for.
void check_back_end(const Dims& d, const Documents& documents, DType dtype, const Context& ctx) {
  if (ctx.back_end() != Device::cuda) return;
  if (d.key_dim != d.value_dim || d.heads != d.value_heads ||
      (d.key_dim != 32 && d.key_dim != 64 && d.key_dim != 128)) {
    fail_user(
        "kda on the GPU: found {} key heads of {} and {} value heads of {}, wanted as many of each and widths 32, 64 "
        "or "
        "128, the same for keys and values; change the model, or set device = \"cpu\"",
        d.heads, d.key_dim, d.value_heads, d.value_dim);
  }
  TESSERA_CHECK(dtype == DType::bf16, "kda on the GPU with activations of {}, wanted bf16", name_of(dtype));
  TESSERA_CHECK(ctx.dry() || documents.gpu_offsets != nullptr, "kda on the GPU: the offsets are not there");
}

Shape state_shape(const Dims& d, int64_t n) { return {n, d.value_heads, d.value_dim, d.key_dim}; }

// Of every document, or of one.
void check_states(const Dims& d, const View& states, int64_t documents, DType exact, const char* what) {
  const bool one = documents > 1 && states.rows() == 1;
  check_view(states, exact, state_shape(d, one ? 1 : documents), what);
}

void check_inputs(const Context& ctx, const Dims& d, const Inputs& in, DType dtype) {
  const DType exact = exact_type(dtype);
  check_dims(d);
  check_back_end(d, in.documents, dtype, ctx);
  in.documents.check(d.tokens);
  check_view(in.q, dtype, {d.tokens, d.heads, d.key_dim}, "kda q");
  check_view(in.k, dtype, {d.tokens, d.heads, d.key_dim}, "kda k");
  check_view(in.v, dtype, {d.tokens, d.value_heads, d.value_dim}, "kda v");
  check_view(in.z, dtype, {d.tokens, d.value_heads, d.key_dim}, "kda z");
  check_view(in.beta_logit, dtype, {d.tokens, d.value_heads}, "kda beta_logit");
  TESSERA_CHECK(in.a_log.present() || d.gate == Gate::bounded, "kda a_log is absent with the unbounded gate");
  if (in.a_log.present()) check_view(in.a_log, exact, {d.value_heads}, "kda a_log");
  check_view(in.dt_bias, exact, {d.value_heads, d.key_dim}, "kda dt_bias");
  if (in.initial_state.present()) {
    check_states(d, in.initial_state, in.documents.count(), exact, "kda initial_state");
  }
}

void check_saved(const Context& ctx, const Dims& d, const Saved& saved, int64_t chunks, DType dtype) {
  if (ctx.back_end() == Device::cuda) return;  // nothing is
  check_view(saved.inverse, dtype, {chunks, d.value_heads, d.chunk, d.chunk}, "kda saved inverse");
  check_view(saved.states, dtype, state_shape(d, chunks), "kda saved states");
}

void check_grads(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads, DType dtype) {
  const DType exact = exact_type(dtype);
  check_view(dout.o, dtype, in.v.shape(), "kda do");
  if (dout.final_state.present()) {
    check_states(d, dout.final_state, in.documents.count(), exact, "kda dfinal_state");
  }
  check_view(grads.q, dtype, in.q.shape(), "kda dq");
  check_view(grads.k, dtype, in.k.shape(), "kda dk");
  check_view(grads.v, dtype, in.v.shape(), "kda dv");
  check_view(grads.z, dtype, in.z.shape(), "kda dz");
  check_view(grads.beta_logit, dtype, in.beta_logit.shape(), "kda dbeta_logit");
  TESSERA_CHECK(grads.a_log.present() == in.a_log.present(), "kda a_log and its gradient: one is absent");
  if (grads.a_log.present()) check_view(grads.a_log, exact, in.a_log.shape(), "kda da_log");
  check_view(grads.dt_bias, exact, in.dt_bias.shape(), "kda ddt_bias");
  if (grads.initial_state.present()) {
    check_states(d, grads.initial_state, in.documents.count(), exact, "kda dinitial_state");
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

// What a document adds to a state, and the transition, without outputs (a chunk's A and P are made again in a
// backward):
//   forward   Kt S0 and Kh^T R: 4 K a token and column, M X: C; V columns, with the transition V + K. A: C K.
//   backward  Kh dS1, Qt^T dO, Kt^T Y: 6 K V a token.  P^T dO, M^T dR: 2 C V.
double map_flops(const Dims& d, double n, bool transition, Pass pass) {
  const double k = double(d.key_dim), v = double(d.value_dim), columns = v + (transition ? k : 0);
  return pass == Pass::forward ? (4 * k + n) * columns + n * k : (6 * k + 2 * n) * v;
}

// The offsets of one document: what plans, lists of chunks and costs need of a pack. Tokens are counted as in the pack.
Documents only(const Documents& documents, int64_t document) {
  return {documents.offsets.subspan(static_cast<size_t>(document), 2),
          documents.gpu_offsets == nullptr ? nullptr : documents.gpu_offsets + document};
}

void check_document(const Documents& documents, int64_t document) {
  TESSERA_CHECK(document >= 0 && document < documents.count(), "kda map of document {} of {}", document,
                documents.count());
}

void check_fold(const StateMap& map, const View& state) {
  const DType dtype = state.dtype();
  TESSERA_CHECK(state.rank() == 3, "kda fold of a state {}, wanted (HV, V, K)", state.shape().to_string());
  check_view(map.offset, dtype, state.shape(), "kda map offset");
  if (map.transition.present()) {
    check_view(map.transition, dtype, {state.dim(0), state.dim(2), state.dim(2)}, "kda map transition");
  }
}

void fold(Context& ctx, const StateMap& map, Pass pass, const View& state) {
  check_fold(map, state);
  if (!map.transition.present()) return copy(map.offset, state);
  const int64_t width = state.dim(2), row = thread_count() * width * bytes_of(state.dtype());
  const bool cuda = ctx.back_end() == Device::cuda;
  OpScope op(ctx, "kda_fold", pass,
             {.gemm_flops = 2 * state.elements() * width,
              .bytes_moved = 3 * state.bytes() + map.transition.bytes(),
              .workspace_bytes = cuda ? 0 : Arena::aligned(row)});
  if (cuda) {
    cuda::check_fold(state);
    if (!ctx.dry()) cuda::fold(ctx.stream(), map, pass, state);
    return;
  }
  const View rows = ctx.arena.allocate(state.dtype(), {thread_count(), width});
  if (!ctx.dry()) cpu::fold(map, pass, state, rows);
}

Costs step_costs(const Dims& d, DType dtype, Device back_end) {
  const int64_t states = d.tokens * d.value_heads * d.key_dim * d.value_dim;
  const int64_t scratch = back_end == Device::cuda ? 0 : thread_count() * cpu::step_scratch(d) * bytes_of(dtype);
  return {.gemm_flops = 6 * states,
          .vector_flops = states,
          .bytes_moved = 2 * states * bytes_of(exact_type(dtype)),
          .workspace_bytes = Arena::aligned(scratch)};
}

}  // namespace

int64_t chunk_count(const Documents& documents, int64_t chunk) {
  int64_t chunks = 0;
  for (int64_t n = 0; n < documents.count(); ++n) chunks += (documents.length(n) + chunk - 1) / chunk;
  return chunks;
}

Costs costs(const Dims& d, const Documents& documents, DType dtype, Pass pass, Device back_end) {
  const bool cuda = back_end == Device::cuda, forward = pass == Pass::forward;
  const int64_t chunks = chunk_count(documents, cuda ? cuda::kChunk : d.chunk);
  const int64_t element = bytes_of(dtype), rows = d.tokens * d.value_heads;
  const double mean = chunks == 0 ? 0.0 : double(d.tokens) / double(chunks);
  const int64_t inverse = cuda ? 0 : chunks * d.value_heads * d.chunk * d.chunk;
  const int64_t states = cuda ? 0 : chunks * d.value_heads * d.value_dim * d.key_dim;
  const int64_t inputs = 2 * d.tokens * d.heads * d.key_dim + rows * (d.value_dim + d.key_dim + 1);
  Costs c{.gemm_flops = static_cast<int64_t>(double(rows) * product_flops(d, mean, pass)),
          .vector_flops = rows * (forward ? 90 * d.key_dim + 5 * d.value_dim : 200 * d.key_dim + 10 * d.value_dim),
          .bytes_moved = (inputs + rows * d.value_dim + (forward ? 0 : inputs + inverse + states)) * element,
          .saved_bytes = forward ? Arena::aligned(inverse * element) + Arena::aligned(states * element) : 0};
  if (cuda) {
    const cuda::Plan plan = cuda::plan(d, documents);
    c.workspace_bytes = cuda::workspace_bytes(d, plan) + (forward ? 0 : cuda::backward_workspace_bytes(d, plan));
  } else {
    const int64_t scratch =
        thread_count() * (forward ? cpu::forward_scratch(d, dtype) : cpu::backward_scratch(d, dtype));
    const int64_t partials = forward ? 0 : cpu::part_count(d.tokens) * d.value_heads * cpu::partial_width(d);
    c.workspace_bytes = Arena::aligned(scratch * element) + Arena::aligned(partials * element) + parts_bytes(d);
  }
  return c;
}

Saved allocate_saved(Context& ctx, const Dims& d, const Documents& documents, DType dtype) {
  if (ctx.back_end() == Device::cuda) return {};
  const int64_t chunks = chunk_count(documents, d.chunk);
  return {ctx.arena.allocate(dtype, {chunks, d.value_heads, d.chunk, d.chunk}),
          ctx.arena.allocate(dtype, state_shape(d, chunks))};
}

void forward(Context& ctx, const Dims& d, const Inputs& in, const Outputs& out, Saved* saved) {
  const DType dtype = in.q.dtype();
  check_inputs(ctx, d, in, dtype);
  check_view(out.o, dtype, in.v.shape(), "kda o");
  if (out.final_state.present()) {
    check_states(d, out.final_state, in.documents.count(), exact_type(dtype), "kda final_state");
  }
  if (saved != nullptr) check_saved(ctx, d, *saved, chunk_count(in.documents, d.chunk), dtype);
  OpScope op(ctx, "kda", Pass::forward, costs(d, in.documents, dtype, Pass::forward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    const cuda::Plan plan = cuda::plan(d, in.documents);
    const cuda::Workspace workspace = cuda::allocate_workspace(ctx.arena, d, plan);
    if (!ctx.dry()) cuda::forward(ctx.stream(), d, in, out, plan, workspace);
    return;
  }
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::forward_scratch(d, dtype)});
  const View parts = allocate_parts(ctx, d);
  if (ctx.dry()) return;
  cpu::forward(d, in, out, saved, scratch, parts);
}

void backward(Context& ctx, const Dims& d, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads) {
  const DType dtype = in.q.dtype();
  check_inputs(ctx, d, in, dtype);
  check_saved(ctx, d, saved, chunk_count(in.documents, d.chunk), dtype);
  check_grads(d, in, dout, grads, dtype);
  OpScope op(ctx, "kda", Pass::backward, costs(d, in.documents, dtype, Pass::backward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    const cuda::Plan plan = cuda::plan(d, in.documents);
    const cuda::Workspace workspace = cuda::allocate_workspace(ctx.arena, d, plan);
    const cuda::BackwardWorkspace more = cuda::allocate_backward_workspace(ctx.arena, d, plan);
    if (!ctx.dry()) cuda::backward(ctx.stream(), d, in, dout, grads, plan, workspace, more);
    return;
  }
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::backward_scratch(d, dtype)});
  const View partials = ctx.arena.allocate(dtype, {cpu::part_count(d.tokens), d.value_heads, cpu::partial_width(d)});
  const View parts = allocate_parts(ctx, d);
  if (ctx.dry()) return;
  cpu::backward(d, in, saved, dout, grads, scratch, partials, parts);
}

Costs map_costs(const Dims& d, const Documents& documents, int64_t document, bool transition, DType dtype, Pass pass,
                Device back_end) {
  check_document(documents, document);
  const Documents one = only(documents, document);
  const bool cuda = back_end == Device::cuda, forward = pass == Pass::forward;
  const int64_t tokens = documents.length(document), rows = tokens * d.value_heads;
  const int64_t chunks = chunk_count(one, cuda ? cuda::kChunk : d.chunk);
  const double mean = chunks == 0 ? 0.0 : double(tokens) / double(chunks);
  const int64_t inputs = tokens * d.heads * d.key_dim * (forward ? 1 : 2) + rows * (d.value_dim + d.key_dim + 1);
  Costs c{.gemm_flops = static_cast<int64_t>(double(rows) * map_flops(d, mean, transition, pass)),
          .vector_flops = rows * (90 * d.key_dim + 5 * d.value_dim),
          .bytes_moved = inputs * bytes_of(dtype) + d.value_heads * d.key_dim *
                                                        (d.value_dim + (transition ? d.key_dim : 0)) *
                                                        bytes_of(exact_type(dtype))};
  if (cuda) {
    c.workspace_bytes = cuda::workspace_bytes(d, cuda::plan(d, one));
  } else {
    c.workspace_bytes = Arena::aligned(thread_count() * cpu::map_scratch(d, pass, transition, dtype) * bytes_of(dtype));
  }
  return c;
}

void state_map(Context& ctx, const Dims& d, const Inputs& in, int64_t document, const StateMap& map) {
  const DType dtype = in.q.dtype(), exact = exact_type(dtype);
  const bool transition = map.transition.present();
  check_inputs(ctx, d, in, dtype);
  check_document(in.documents, document);
  check_view(map.offset, exact, {d.value_heads, d.value_dim, d.key_dim}, "kda map offset");
  if (transition) check_view(map.transition, exact, {d.value_heads, d.key_dim, d.key_dim}, "kda map transition");
  OpScope op(ctx, "kda_map", Pass::forward,
             map_costs(d, in.documents, document, transition, dtype, Pass::forward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    Inputs one = in;
    one.documents = only(in.documents, document);
    const cuda::Plan plan = cuda::plan(d, one.documents);
    const cuda::Workspace workspace = cuda::allocate_workspace(ctx.arena, d, plan);
    if (!ctx.dry()) cuda::state_map(ctx.stream(), d, one, plan, workspace, map);
    return;
  }
  const View scratch =
      ctx.arena.allocate(dtype, {thread_count(), cpu::map_scratch(d, Pass::forward, transition, dtype)});
  if (!ctx.dry()) cpu::state_map(d, in, document, map, scratch);
}

void state_gradient_map(Context& ctx, const Dims& d, const Inputs& in, const Saved& saved, const View& d_o,
                        int64_t document, const View& offset) {
  const DType dtype = in.q.dtype();
  check_inputs(ctx, d, in, dtype);
  check_saved(ctx, d, saved, chunk_count(in.documents, d.chunk), dtype);
  check_document(in.documents, document);
  check_view(d_o, dtype, in.v.shape(), "kda do");
  check_view(offset, exact_type(dtype), {d.value_heads, d.value_dim, d.key_dim}, "kda map offset");
  OpScope op(ctx, "kda_map", Pass::backward,
             map_costs(d, in.documents, document, false, dtype, Pass::backward, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    Inputs one = in;
    one.documents = only(in.documents, document);
    const cuda::Plan plan = cuda::plan(d, one.documents);
    const cuda::Workspace workspace = cuda::allocate_workspace(ctx.arena, d, plan);
    if (!ctx.dry()) cuda::state_gradient_map(ctx.stream(), d, one, d_o, plan, workspace, offset);
    return;
  }
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::map_scratch(d, Pass::backward, false, dtype)});
  if (!ctx.dry()) cpu::state_gradient_map(d, in, saved, d_o, document, offset, scratch);
}

void fold(Context& ctx, const StateMap& map, const View& state) { fold(ctx, map, Pass::forward, state); }
void fold_gradient(Context& ctx, const StateMap& map, const View& d_state) { fold(ctx, map, Pass::backward, d_state); }

void step(Context& ctx, const Dims& d, const Inputs& in, const View& state, const View& o) {
  const DType dtype = in.q.dtype();
  check_inputs(ctx, d, in, dtype);
  TESSERA_CHECK(in.documents.count() == d.tokens, "kda step with {} tokens of {} sequences, wanted one each", d.tokens,
                in.documents.count());
  check_view(state, exact_type(dtype), state_shape(d, d.tokens), "kda state");
  check_view(o, dtype, in.v.shape(), "kda o");
  OpScope op(ctx, "kda_step", Pass::forward, step_costs(d, dtype, ctx.back_end()));
  if (ctx.back_end() == Device::cuda) {
    if (!ctx.dry()) cuda::step(ctx.stream(), d, in, state, o);
    return;
  }
  const View scratch = ctx.arena.allocate(dtype, {thread_count(), cpu::step_scratch(d)});
  if (ctx.dry()) return;
  cpu::step(d, in, state, o, scratch);
}

}  // namespace tessera::ops::kda
