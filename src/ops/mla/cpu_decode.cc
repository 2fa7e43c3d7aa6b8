// Decode over latent caches, W_kvb absorbed into the query and the output:
//
//   a_h = scale [q_n UK_h | q_p],   logit_j = a_h . cache_j,   m_h = sum_j p_j c_j,   o_h = UV_h m_h
//
// The cache is read once for all heads. Keys are cut into chunks of fixed size, so that one long sequence and many
// short ones both give work to all threads; a chunk leaves its maximum, sum and mixture, merged in the order of the
// chunks.
#include <limits>

#include "core/fast_math.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/cpu.h"
#include "ops/mla/cpu_blocks.h"

namespace tessera::ops::mla::cpu {
namespace {

constexpr int64_t kChunk = 512;  // keys

struct KeyChunk {
  int64_t sequence, first;
};

template <class F>
void for_each_chunk(const DecodeInputs& in, F&& f) {
  for (size_t n = 0; n < in.latent.size(); ++n) {
    for (int64_t first = 0; first < in.latent[n].rows(); first += kChunk) f(KeyChunk{static_cast<int64_t>(n), first});
  }
}

// What the products below share: the up-projections of a head and the widths.
template <class Real>
struct Weights {
  const Real* kv_b;
  int64_t rank, nope_dim, value_dim;

  const Real* keys(int64_t h) const { return kv_b + h * (nope_dim + value_dim) * rank; }  // UK_h (d_n, r)
  const Real* values(int64_t h) const { return keys(h) + nope_dim * rank; }               // UV_h (d_v, r)
};

template <class Real>
void absorb_queries(const Dims& d, const View& q, const Weights<Real>& weights, Real* absorbed) {
  const int64_t dk = d.key_dim(), r = weights.rank, width = r + d.rope_dim;
  const Real scale = Real(d.logit_scale());
  parallel_slots(d.heads, [&](int64_t h, int64_t) {
    const Real* from = q.as<Real>() + h * dk;
    gemm<Real>(Trans::no, Trans::no, d.tokens, r, d.nope_dim, scale, from, d.heads * dk, weights.keys(h), r, Real(0),
               absorbed + h * width, d.heads * width);
    for (int64_t n = 0; n < d.tokens; ++n) {
      const Real* shared = from + n * d.heads * dk + d.nope_dim;
      Real* to = absorbed + (n * d.heads + h) * width + r;
      for (int64_t i = 0; i < d.rope_dim; ++i) to[i] = scale * shared[i];
    }
  });
}

// One chunk of one sequence's cache for all heads: maximum (H), sum (H) and mixture (H, r) of the chunk alone.
template <class Real>
void attend_chunk(const Dims& d, const Real* query, const View& cache, int64_t first, int64_t rank, Real* logits,
                  Real* maximum, Real* sum, Real* mixture) {
  const int64_t keys = std::min(kChunk, cache.rows() - first), stride = cache.row_stride(), width = rank + d.rope_dim;
  const Real* latent = cache.as<Real>() + first * stride;
  gemm<Real>(Trans::no, Trans::yes, d.heads, keys, width, Real(1), query, width, latent, stride, Real(0), logits,
             kChunk);
  for (int64_t h = 0; h < d.heads; ++h) {
    Real* row = logits + h * kChunk;
    Real top = -std::numeric_limits<Real>::infinity(), total = 0;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < keys; ++j) top = std::max(top, row[j]);
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < keys; ++j) {
      row[j] = fast::exp(row[j] - top);
      total += row[j];
    }
    maximum[h] = top;
    sum[h] = total;
  }
  gemm<Real>(Trans::no, Trans::no, d.heads, rank, keys, Real(1), logits, kChunk, latent, stride, Real(0), mixture,
             rank);
}

// The chunks [begin, end) of a sequence, head h: merged = sum of their mixtures at the common maximum over the sum.
template <class Real>
void merge_chunks(const Dims& d, const DecodeWorkspace& w, int64_t begin, int64_t end, int64_t h, Real* merged) {
  const Real *maximum = w.maximum.as<Real>(), *sum = w.sum.as<Real>();
  const int64_t rank = w.mixture.dim(2);
  Real top = maximum[begin * d.heads + h], total = 0;
  for (int64_t c = begin; c < end; ++c) top = std::max(top, maximum[c * d.heads + h]);
  for (int64_t c = begin; c < end; ++c) total += sum[c * d.heads + h] * fast::exp(maximum[c * d.heads + h] - top);
  std::fill_n(merged, rank, Real(0));
  for (int64_t c = begin; c < end; ++c) {
    const Real weight = fast::exp(maximum[c * d.heads + h] - top) / total;
    const Real* mixture = w.mixture.as<Real>() + (c * d.heads + h) * rank;
#pragma omp simd
    for (int64_t i = 0; i < rank; ++i) merged[i] += weight * mixture[i];
  }
}

template <class Real>
void run(const Dims& d, const DecodeInputs& in, Real* o, const DecodeWorkspace& w) {
  const int64_t rank = in.kv_b.dim(1), width = rank + d.rope_dim;
  const Weights<Real> weights{in.kv_b.as<Real>(), rank, d.nope_dim, d.value_dim};
  Real *query = w.query.as<Real>(), *merged = w.merged.as<Real>();
  absorb_queries(d, in.q, weights, query);

  auto* chunks = static_cast<KeyChunk*>(w.chunks.data());
  int64_t count = 0;
  for_each_chunk(in, [&](KeyChunk chunk) { chunks[count++] = chunk; });
  parallel_slots(count, [&](int64_t c, int64_t slot) {
    const KeyChunk chunk = chunks[c];
    attend_chunk(d, query + chunk.sequence * d.heads * width, in.latent[static_cast<size_t>(chunk.sequence)],
                 chunk.first, rank, w.threads.as<Real>() + slot * w.threads.dim(1), w.maximum.as<Real>() + c * d.heads,
                 w.sum.as<Real>() + c * d.heads, w.mixture.as<Real>() + c * d.heads * rank);
  });
  parallel_ranges(d.heads, std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(count * rank, 1)),
                  [&](int64_t first_head, int64_t last_head) {
                    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
                      const int64_t n = chunks[begin].sequence;
                      while (end < count && chunks[end].sequence == n) ++end;
                      for (int64_t h = first_head; h < last_head; ++h) {
                        merge_chunks(d, w, begin, end, h, merged + (n * d.heads + h) * rank);
                      }
                    }
                  });

  parallel_slots(d.heads, [&](int64_t h, int64_t) {
    gemm<Real>(Trans::no, Trans::yes, d.tokens, d.value_dim, rank, Real(1), merged + h * rank, d.heads * rank,
               weights.values(h), rank, Real(0), o + h * d.value_dim, d.heads * d.value_dim);
  });
}

}  // namespace

DecodeWorkspace allocate_decode(Arena& arena, const Dims& d, const DecodeInputs& in) {
  const DType dtype = in.q.dtype();
  const int64_t rank = in.kv_b.dim(1);
  int64_t count = 0;
  for_each_chunk(in, [&](KeyChunk) { ++count; });
  return {.query = arena.allocate(dtype, {d.tokens, d.heads, rank + d.rope_dim}),
          .chunks = arena.allocate(DType::i64, {count, 2}),
          .maximum = arena.allocate(dtype, {count, d.heads}),
          .sum = arena.allocate(dtype, {count, d.heads}),
          .mixture = arena.allocate(dtype, {count, d.heads, rank}),
          .merged = arena.allocate(dtype, {d.tokens, d.heads, rank}),
          .threads = arena.allocate(dtype, {thread_count(), d.heads * kChunk})};
}

void decode(const Dims& d, const DecodeInputs& in, const View& o, const DecodeWorkspace& workspace) {
  dispatch_real(in.q.dtype(), [&](auto real) {
    using Real = decltype(real);
    run<Real>(d, in, o.as<Real>(), workspace);
  });
}

}  // namespace tessera::ops::mla::cpu
