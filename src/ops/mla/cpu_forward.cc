// Attention forward: blocks of queries against blocks of keys, with a running maximum m and sum l of each row,
//
//   m' = max(m, max S),   P = exp(S - m'),   l' = l exp(m - m') + sum P,   O' = O exp(m - m') + P V,   o = O / l
//
// One item is one head and one block of queries of a document; key blocks are taken in order of position. Where the
// queries begin behind the keys (op.h), the first stands at position keys - queries of its document.
#include <limits>

#include "core/fast_math.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/cpu.h"
#include "ops/mla/cpu_blocks.h"

namespace tessera::ops::mla::cpu {
namespace {

struct QueryBlock {
  int64_t document, first;
};

template <class F>
void for_each_query_block(const Documents& documents, F&& f) {
  for (int64_t n = 0; n < documents.count(); ++n) {
    for (int64_t first = 0; first < documents.length(n); first += kQueries) f(QueryBlock{n, first});
  }
}

// A thread's own memory, carved from its row of the workspace.
template <class Real>
struct Blocks {
  Real *keys, *values;   // (d_n + d_p, kKeys) transposed, (kKeys, d_v)
  Real *logits, *mixed;  // (kQueries, kKeys), (kQueries, d_v)
  Real *maximum, *sum;   // (kQueries)
  Real* pair;            // (2, d_n + d_p)

  Blocks(const Dims& d, Carver<Real>& carver)
      : keys(carver.take(d.key_dim() * kKeys)),
        values(carver.take(kKeys * d.value_dim)),
        logits(carver.take(kQueries * kKeys)),
        mixed(carver.take(kQueries * d.value_dim)),
        maximum(carver.take(kQueries)),
        sum(carver.take(kQueries)),
        pair(carver.take(2 * d.key_dim())) {}
};

// One row of logits, the first `valid` of them visible: exponentials in place (0 up to `width`, whole vectors), new
// maximum and sum, and the row's mixture brought to the new maximum.
template <class Real>
void soften_row(Real* logits, int64_t valid, int64_t width, Real& maximum, Real& sum, Real* mixed, int64_t value_dim) {
  std::fill(logits + valid, logits + width, -std::numeric_limits<Real>::infinity());
  Real top = maximum;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < width; ++j) top = std::max(top, logits[j]);
  Real added = 0;
#pragma omp simd reduction(+ : added)
  for (int64_t j = 0; j < width; ++j) {
    const Real p = fast::exp(logits[j] - top);
    logits[j] = p;
    added += p;
  }
  if (top > maximum && sum > 0) {
    const Real fade = fast::exp(maximum - top);
    sum *= fade;
#pragma omp simd
    for (int64_t i = 0; i < value_dim; ++i) mixed[i] *= fade;
  }
  maximum = top;
  sum += added;
}

// The queries at positions [first, first + rows) of one document and head, whose rows begin at `q`; the keys begin at
// the document's first.
template <class Real>
void attend(const Dims& d, const Head<Real>& head, const Real* q, int64_t first, int64_t rows, const Blocks<Real>& b) {
  const int64_t dk = d.key_dim();
  std::fill_n(b.maximum, rows, -std::numeric_limits<Real>::infinity());
  std::fill_n(b.sum, rows, Real(0));
  for (int64_t k0 = 0, keys = 0; k0 < first + rows; k0 += keys) {
    keys = std::min(k0 + kKeys <= first ? kKeys : kDiagonal, first + rows - k0);
    const int64_t width = padded(keys), skip = std::max<int64_t>(k0 - first, 0);  // rows before the first key
    const int64_t m = rows - skip;
    pack_keys_transposed(d, head, k0, keys, b.keys);
    pack_rows(keys, d.value_dim, head.value + k0 * head.kv_stride, head.kv_stride, b.values, d.value_dim);
    int64_t stride = d.heads * dk;
    const Real* queries = q + skip * stride;
    if (m == 1) pair_up(dk, queries, stride, b.pair);
    const int64_t computed = std::max<int64_t>(m, 2);
    gemm<Real>(Trans::no, Trans::no, computed, width, dk, Real(d.logit_scale()), queries, stride, b.keys, kKeys,
               Real(0), b.logits, kKeys);
    for (int64_t i = 0; i < m; ++i) {
      const int64_t row = skip + i, valid = std::min(keys, first + row - k0 + 1);
      soften_row(b.logits + i * kKeys, valid, width, b.maximum[row], b.sum[row], b.mixed + row * d.value_dim,
                 d.value_dim);
    }
    gemm<Real>(Trans::no, Trans::no, computed, d.value_dim, width, Real(1), b.logits, kKeys, b.values, d.value_dim,
               Real(k0 == 0 ? 0 : 1), b.mixed + skip * d.value_dim, d.value_dim);
  }
}

template <class Real>
void run(const Dims& d, const Inputs& in, const Outputs& out, Real* lse, const ForwardWorkspace& w) {
  auto* blocks = static_cast<QueryBlock*>(w.blocks.data());
  int64_t count = 0;
  for_each_query_block(in.documents, [&](QueryBlock block) { blocks[count++] = block; });
  // From the last block of a document to its first: the long ones are handed out early and the short ones fill up.
  parallel_slots(count * d.heads, [&](int64_t item, int64_t slot) {
    const int64_t index = count - 1 - item / d.heads, h = item % d.heads;
    const QueryBlock block = blocks[index];
    const int64_t begin = in.documents.begin(block.document), length = in.documents.length(block.document);
    const int64_t position = in.key_documents.length(block.document) - length + block.first;
    const int64_t rows = std::min(kQueries, length - block.first), first_row = (begin + block.first) * d.heads + h;
    Carver<Real> carver(w.threads.as<Real>() + slot * w.threads.dim(1));
    const Blocks<Real> b(d, carver);
    attend(d, Head<Real>(d, in, in.key_documents.begin(block.document), h), in.q.as<Real>() + first_row * d.key_dim(),
           position, rows, b);
    Real top = b.maximum[0];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = first_row + i * d.heads;
      Real* o = out.o.as<Real>() + row * d.value_dim;
      const Real scale = 1 / b.sum[i];
#pragma omp simd
      for (int64_t v = 0; v < d.value_dim; ++v) o[v] = b.mixed[i * d.value_dim + v] * scale;
      if (lse != nullptr) lse[row] = b.maximum[i] + std::log(b.sum[i]);
      top = std::max(top, b.maximum[i]);
    }
    w.max_logit.as<Real>()[index * d.heads + h] = top;
  });
  if (!out.max_logit.present()) return;
  Real* max_logit = out.max_logit.as<Real>();
  for (int64_t i = 0; i < count * d.heads; ++i) {
    max_logit[i % d.heads] = std::max(max_logit[i % d.heads], w.max_logit.as<Real>()[i]);
  }
}

}  // namespace

ForwardWorkspace allocate_forward(Arena& arena, const Dims& d, const Documents& documents, DType dtype) {
  int64_t count = 0;
  for_each_query_block(documents, [&](QueryBlock) { ++count; });
  return {.blocks = arena.allocate(DType::i64, {count, 2}),
          .max_logit = arena.allocate(dtype, {count, d.heads}),
          .threads = arena.allocate(dtype, {thread_count(), block_elements<Blocks>(d, dtype)})};
}

void forward(const Dims& d, const Inputs& in, const Outputs& out, Saved* saved, const ForwardWorkspace& workspace) {
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    run<Real>(d, in, out, saved == nullptr ? nullptr : saved->lse.as<Real>(), workspace);
  });
}

}  // namespace tessera::ops::mla::cpu
