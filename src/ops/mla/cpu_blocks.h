// What the forward and backward of attention share on the CPU: block sizes, packing of keys and values, hand-out.
//
// Keys and values of a block are copied into a thread's own memory: the copy is read by many rows of queries, and with
// keys transposed every product has the plain form A B, whose bits depend neither on the number of rows nor on zero
// columns behind. A block is filled with zero keys up to a multiple of kPad, so that a document's outputs do not change
// when tokens follow or when its neighbours in the pack change.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "ops/mla/op.h"

namespace tessera::ops::mla::cpu {

inline constexpr int64_t kQueries = 256;  // rows of a block: large enough to pay for packing the keys
inline constexpr int64_t kKeys = 128;     // widest key block
inline constexpr int64_t kDiagonal = 64;  // block size along the diagonal, where half of a block is masked
inline constexpr int64_t kPad = 16;       // one vector register of float32

inline int64_t padded(int64_t keys) { return (keys + kPad - 1) / kPad * kPad; }

// f(item, slot): slot numbers the thread's own workspace. There are at least two items, the second idle, because gemm
// runs on the calling thread (and so gives the same bits for one item as for many) only inside a parallel region.
template <class F>
void parallel_slots(int64_t n, F&& f) {
  if (n == 0) return;
  const bool nested = omp_in_parallel();
  parallel_items(std::max<int64_t>(n, 2), [&](int64_t i) {
    if (i < n) f(i, nested ? int64_t{0} : int64_t{omp_get_thread_num()});
  });
}

// Cuts one thread's memory into blocks, each beginning at a cache line. Without memory it only counts.
template <class Real>
class Carver {
 public:
  explicit Carver(Real* memory) : memory_(memory) {}
  Real* take(int64_t elements) {
    Real* block = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += Arena::aligned(elements * kBytes) / kBytes;
    return block;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kBytes = bytes_of(dtype_of<Real>);
  Real* memory_;
  int64_t used_ = 0;
};

// Elements that a thread's Blocks, made of dims and a carver, take.
template <template <class> class Blocks>
int64_t block_elements(const Dims& d, DType dtype) {
  int64_t elements = 0;
  dispatch_real(dtype, [&](auto real) {
    Carver<decltype(real)> carver(nullptr);
    Blocks<decltype(real)>(d, carver);
    elements = carver.used();
  });
  return elements;
}

// The tensors of one head, rows one token apart.
template <class Real>
struct Head {
  const Real *key, *shared, *value;  // key rows d_n and value rows d_v of kv, key rows d_p of k_shared
  int64_t kv_stride, shared_stride;

  Head(const Dims& d, const Inputs& in, int64_t token, int64_t head)  // token: of the keys
      : key(in.kv.as<Real>() + (token * d.heads + head) * (d.nope_dim + d.value_dim)),
        shared(in.k_shared.as<Real>() + token * in.k_shared.row_stride()),
        value(key + d.nope_dim),
        kv_stride(d.heads * (d.nope_dim + d.value_dim)),
        shared_stride(in.k_shared.row_stride()) {}
};

// A product of one row may take a matrix-vector kernel, whose sums run in another order than those of many rows. So a
// lone row is computed as the first of two, the second zero: `pair` (2, width) is filled, and pointer and stride are
// turned to it.
template <class Real>
void pair_up(int64_t width, const Real*& row, int64_t& stride, Real* pair) {
  std::copy_n(row, width, pair);
  std::fill_n(pair + width, width, Real(0));
  row = pair;
  stride = width;
}

// to (width, kKeys) column j = row j of `from`, for `keys` rows; columns up to padded(keys) are zero. Tiles of kPad
// keys keep the reads within as many cache lines.
template <class Real>
void pack_transposed(int64_t keys, int64_t width, const Real* from, int64_t stride, Real* to) {
  for (int64_t j0 = 0; j0 < keys; j0 += kPad) {
    const int64_t n = std::min(kPad, keys - j0);
    const Real* tile = from + j0 * stride;
    if (n == kPad) {
      for (int64_t i = 0; i < width; ++i) {
#pragma omp simd
        for (int64_t j = 0; j < kPad; ++j) to[i * kKeys + j0 + j] = tile[j * stride + i];
      }
    } else {
      for (int64_t i = 0; i < width; ++i) {
        for (int64_t j = 0; j < kPad; ++j) to[i * kKeys + j0 + j] = j < n ? tile[j * stride + i] : Real(0);
      }
    }
  }
}

// to (padded(keys), ld): rows of `from`, then zero rows.
template <class Real>
void pack_rows(int64_t keys, int64_t width, const Real* from, int64_t stride, Real* to, int64_t ld) {
  for (int64_t j = 0; j < keys; ++j) std::copy_n(from + j * stride, width, to + j * ld);
  for (int64_t j = keys; j < padded(keys); ++j) std::fill_n(to + j * ld, width, Real(0));
}

template <class Real>
void pack_keys_transposed(const Dims& d, const Head<Real>& h, int64_t first, int64_t keys, Real* to) {
  pack_transposed(keys, d.nope_dim, h.key + first * h.kv_stride, h.kv_stride, to);
  pack_transposed(keys, d.rope_dim, h.shared + first * h.shared_stride, h.shared_stride, to + d.nope_dim * kKeys);
}

}  // namespace tessera::ops::mla::cpu
