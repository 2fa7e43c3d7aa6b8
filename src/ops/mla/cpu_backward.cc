// Attention backward, from the log-sum-exp of each row, with delta_i = <do_i, o_i>:
//
//   P = exp(S - lse),  dP = do V^T,  dS = P o (dP - delta),
//   dV = P^T do,   dk = scale dS^T q,   dq = scale dS k,   dk_shared = sum over heads of the last d_p columns of dk
//
// One item is one head and a piece of a document's keys: key blocks outside, queries inside, so that the gradients of a
// key block stay in the thread's memory and dq of the (document, head) is added to in the order of the keys. Pieces are
// taken in groups of at most kGroup keys, one group after the other: within a group a (document, head) occurs once, so
// nothing is shared; between groups the heads' parts of dk_shared are added in head order. Neither the groups nor the
// threads change the order of any sum.
#include <limits>
#include <vector>

#include "core/fast_math.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/cpu.h"
#include "ops/mla/cpu_blocks.h"

namespace tessera::ops::mla::cpu {
namespace {

constexpr int64_t kGroup = 1024;  // keys of a group: bounds the per-head parts of dk_shared
constexpr int64_t kRows = 256;    // queries of a step
static_assert(kGroup % kKeys == 0, "a document is cut at key blocks only");

struct Piece {
  int64_t document, first, keys;  // keys [first, first + keys) of the document
};

template <class Real>
struct Blocks {
  Real *keys, *keys_transposed, *values_transposed;  // (kKeys, d_n + d_p), its transpose, (d_v, kKeys)
  Real *d_keys, *d_values;                           // (kKeys, d_n + d_p), (kKeys, d_v)
  Real *p, *ds;                                      // (kRows, kKeys)
  Real *pair_q, *pair_do, *pair_dq;                  // (2, d_n + d_p), (2, d_v), (2, d_n + d_p)

  Blocks(const Dims& d, Carver<Real>& carver)
      : keys(carver.take(kKeys * d.key_dim())),
        keys_transposed(carver.take(d.key_dim() * kKeys)),
        values_transposed(carver.take(d.value_dim * kKeys)),
        d_keys(carver.take(kKeys * d.key_dim())),
        d_values(carver.take(kKeys * d.value_dim)),
        p(carver.take(kRows * kKeys)),
        ds(carver.take(kRows * kKeys)),
        pair_q(carver.take(2 * d.key_dim())),
        pair_do(carver.take(2 * d.value_dim)),
        pair_dq(carver.take(2 * d.key_dim())) {}
};

// Rows of one head in the (T, H, .) tensors, from a document's first query on, which stands at position `first` of it.
template <class Real>
struct Rows {
  const Real *q, *d_o, *lse, *delta;
  Real* dq;
  int64_t first;
};

// p holds logits, ds holds dP: both become what their names say; masked entries become 0.
template <class Real>
void soften_row(Real* p, Real* ds, int64_t valid, int64_t width, Real lse, Real delta) {
  std::fill(p + valid, p + width, -std::numeric_limits<Real>::infinity());
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const Real e = fast::exp(p[j] - lse);
    p[j] = e;
    ds[j] = e * (ds[j] - delta);
  }
}

// The key block [k0, k0 + keys) against the queries at [q0, q0 + m), of which keys up to k0 + width are seen.
template <class Real>
void step(const Dims& d, const Rows<Real>& r, const Blocks<Real>& b, int64_t k0, int64_t keys, int64_t width,
          int64_t q0, int64_t m) {
  const int64_t dk = d.key_dim(), dv = d.value_dim, first_row = q0 - r.first;
  const Real scale = Real(d.logit_scale());
  int64_t q_stride = d.heads * dk, o_stride = d.heads * dv, dq_stride = q_stride;
  const Real *q = r.q + first_row * q_stride, *d_o = r.d_o + first_row * o_stride;
  Real *const own_dq = r.dq + first_row * dq_stride, *dq = own_dq;
  const int64_t computed = std::max<int64_t>(m, 2);
  if (m == 1) {
    const Real* before = own_dq;
    pair_up(dk, q, q_stride, b.pair_q);
    pair_up(dv, d_o, o_stride, b.pair_do);
    pair_up(dk, before, dq_stride, b.pair_dq);
    dq = b.pair_dq;
  }
  gemm<Real>(Trans::no, Trans::no, computed, width, dk, scale, q, q_stride, b.keys_transposed, kKeys, Real(0), b.p,
             kKeys);
  gemm<Real>(Trans::no, Trans::no, computed, width, dv, Real(1), d_o, o_stride, b.values_transposed, kKeys, Real(0),
             b.ds, kKeys);
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = (first_row + i) * d.heads;
    soften_row(b.p + i * kKeys, b.ds + i * kKeys, std::min(keys, q0 + i - k0 + 1), width, r.lse[row], r.delta[row]);
  }
  gemm<Real>(Trans::yes, Trans::no, width, dv, computed, Real(1), b.p, kKeys, d_o, o_stride, Real(1), b.d_values, dv);
  gemm<Real>(Trans::yes, Trans::no, width, dk, computed, scale, b.ds, kKeys, q, q_stride, Real(1), b.d_keys, dk);
  gemm<Real>(Trans::no, Trans::no, computed, dk, width, scale, b.ds, kKeys, b.keys, dk, Real(k0 == 0 ? 0 : 1), dq,
             dq_stride);
  if (m == 1) std::copy_n(b.pair_dq, dk, own_dq);
}

// All queries of the document that see the key block. Small steps along the diagonal, where half of a step is masked.
template <class Real>
void key_block(const Dims& d, const Head<Real>& head, const Rows<Real>& r, const Blocks<Real>& b, int64_t length,
               int64_t k0, int64_t keys) {
  const int64_t dk = d.key_dim();
  pack_keys_transposed(d, head, k0, keys, b.keys_transposed);
  pack_transposed(keys, d.value_dim, head.value + k0 * head.kv_stride, head.kv_stride, b.values_transposed);
  pack_rows(keys, d.nope_dim, head.key + k0 * head.kv_stride, head.kv_stride, b.keys, dk);
  pack_rows(keys, d.rope_dim, head.shared + k0 * head.shared_stride, head.shared_stride, b.keys + d.nope_dim, dk);
  std::fill_n(b.d_keys, padded(keys) * dk, Real(0));
  std::fill_n(b.d_values, padded(keys) * d.value_dim, Real(0));
  for (int64_t q0 = std::max(k0, r.first), m = 0; q0 < length; q0 += m) {
    m = std::min(q0 < k0 + kKeys ? kDiagonal : kRows, length - q0);
    step(d, r, b, k0, keys, padded(std::min(keys, q0 + m - k0)), q0, m);
  }
}

template <class Real>
void run_piece(const Dims& d, const Inputs& in, const Rows<Real>& rows, const Grads& grads, const Blocks<Real>& b,
               const Piece& piece, int64_t h, Real* dk_shared) {
  const int64_t begin = in.key_documents.begin(piece.document), length = in.key_documents.length(piece.document);
  const int64_t dk = d.key_dim(), kv_width = d.nope_dim + d.value_dim;
  const Head<Real> head(d, in, begin, h);
  for (int64_t k0 = piece.first; k0 < piece.first + piece.keys; k0 += kKeys) {
    const int64_t keys = std::min(kKeys, piece.first + piece.keys - k0);
    key_block(d, head, rows, b, length, k0, keys);
    for (int64_t j = 0; j < keys; ++j) {
      Real* dkv = grads.kv.as<Real>() + ((begin + k0 + j) * d.heads + h) * kv_width;
      std::copy_n(b.d_keys + j * dk, d.nope_dim, dkv);
      std::copy_n(b.d_values + j * d.value_dim, d.value_dim, dkv + d.nope_dim);
      std::copy_n(b.d_keys + j * dk + d.nope_dim, d.rope_dim, dk_shared + (k0 - piece.first + j) * d.rope_dim);
    }
  }
}

// Calls f(pieces, first token, tokens) for each group of keys.
template <class F>
void for_each_group(const Documents& documents, F&& f) {
  std::vector<Piece> pieces;
  pieces.reserve(kGroup);
  int64_t first_token = 0, tokens = 0;
  const auto close = [&] {
    if (tokens > 0) f(pieces, first_token, tokens);
    pieces.clear();
    first_token += tokens;
    tokens = 0;
  };
  for (int64_t n = 0; n < documents.count(); ++n) {
    for (int64_t first = 0, keys = 0; first < documents.length(n); first += keys) {
      if (kGroup - tokens < kKeys) close();
      // The room left, in whole key blocks unless the document ends in it.
      keys = std::min((kGroup - tokens) / kKeys * kKeys, documents.length(n) - first);
      pieces.push_back({n, first, keys});
      tokens += keys;
    }
  }
  close();
}

template <class Real>
void take_delta(const Dims& d, const Outputs& out, const OutputGrads& dout, Real* delta) {
  const Real *o = out.o.as<Real>(), *d_o = dout.o.as<Real>();
  parallel_ranges(d.tokens * d.heads, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Real sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < d.value_dim; ++i) sum += o[row * d.value_dim + i] * d_o[row * d.value_dim + i];
      delta[row] = sum;
    }
  });
}

// k_shared gradient of tokens [first, first + tokens): the parts (H, kGroup, d_p) of all heads, in order.
template <class Real>
void add_heads(const Dims& d, const Real* parts, int64_t first, int64_t tokens, const View& k_shared) {
  parallel_ranges(tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Real* to = k_shared.as<Real>() + (first + t) * k_shared.row_stride();
      std::fill_n(to, d.rope_dim, Real(0));
      for (int64_t h = 0; h < d.heads; ++h) {
        const Real* part = parts + (h * kGroup + t) * d.rope_dim;
#pragma omp simd
        for (int64_t i = 0; i < d.rope_dim; ++i) to[i] += part[i];
      }
    }
  });
}

template <class Real>
void run(const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved, const OutputGrads& dout,
         const Grads& grads, const BackwardWorkspace& w) {
  take_delta(d, out, dout, w.delta.as<Real>());
  for_each_group(in.key_documents, [&](const std::vector<Piece>& pieces, int64_t first_token, int64_t tokens) {
    parallel_slots(static_cast<int64_t>(pieces.size()) * d.heads, [&](int64_t item, int64_t slot) {
      const Piece& piece = pieces[static_cast<size_t>(item / d.heads)];
      const int64_t h = item % d.heads, row = in.documents.begin(piece.document) * d.heads + h;
      const Rows<Real> rows{in.q.as<Real>() + row * d.key_dim(),
                            dout.o.as<Real>() + row * d.value_dim,
                            saved.lse.as<Real>() + row,
                            w.delta.as<Real>() + row,
                            grads.q.as<Real>() + row * d.key_dim(),
                            in.key_documents.length(piece.document) - in.documents.length(piece.document)};
      const int64_t place = h * kGroup + in.key_documents.begin(piece.document) + piece.first - first_token;
      Carver<Real> carver(w.threads.as<Real>() + slot * w.threads.dim(1));
      run_piece(d, in, rows, grads, Blocks<Real>(d, carver), piece, h, w.dk_shared.as<Real>() + place * d.rope_dim);
    });
    add_heads(d, w.dk_shared.as<Real>(), first_token, tokens, grads.k_shared);
  });
}

}  // namespace

BackwardWorkspace allocate_backward(Arena& arena, const Dims& d, DType dtype) {
  return {.delta = arena.allocate(dtype, {d.tokens, d.heads}),
          .dk_shared = arena.allocate(dtype, {d.heads, kGroup, d.rope_dim}),
          .threads = arena.allocate(dtype, {thread_count(), block_elements<Blocks>(d, dtype)})};
}

void backward(const Dims& d, const Inputs& in, const Outputs& out, const Saved& saved, const OutputGrads& dout,
              const Grads& grads, const BackwardWorkspace& workspace) {
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    run<Real>(d, in, out, saved, dout, grads, workspace);
  });
}

}  // namespace tessera::ops::mla::cpu
