// What the kernels of the expanded form share: their arguments, the block of a document that a thread block works on,
// and tiles of rows brought to shared memory.
//
// Blocks begin at a document's first query or key, so that a document's bits do not depend on what is packed beside it,
// and rows past its end are zeros. Query i of a document stands at position keys - queries + i among its keys. Dims up
// to the template's (DK, DV) are legal: columns past them are zeros too.
#pragma once

#include "ops/mla/cuda.h"
#include "ops/mla/cuda/mma.h"

namespace tessera::ops::mla::cuda {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Arguments {
  int64_t documents, tokens, key_tokens, heads;
  int nope_dim, rope_dim, value_dim;
  float scale;
  bool whole;  // rows may be read eight elements at a time and written two at a time
  const int64_t *offsets = nullptr, *key_offsets = nullptr;
  const bf16 *q = nullptr, *kv = nullptr, *k_shared = nullptr;
  int64_t shared_stride = 0;
  bf16* o = nullptr;           // written by the forward
  float* lse = nullptr;        // forward: null where it is not kept
  float* max_logit = nullptr;  // forward; null: not wanted
  const bf16* d_o = nullptr;   // backward, from here on
  float *delta = nullptr, *dk_shared_parts = nullptr;
  bf16 *dq = nullptr, *dkv = nullptr, *dk_shared = nullptr;
  int64_t d_shared_stride = 0;

  __host__ __device__ int64_t key_dim() const { return nope_dim + rope_dim; }
  __host__ __device__ int64_t kv_dim() const { return nope_dim + value_dim; }
};

inline Arguments arguments(const Dims& d, const Inputs& in) {
  Arguments a{
      .documents = in.documents.count(),
      .tokens = d.tokens,
      .key_tokens = in.key_documents.tokens(),
      .heads = d.heads,
      .nope_dim = static_cast<int>(d.nope_dim),
      .rope_dim = static_cast<int>(d.rope_dim),
      .value_dim = static_cast<int>(d.value_dim),
      .scale = static_cast<float>(d.logit_scale()),
      .whole = d.nope_dim % 8 == 0 && d.rope_dim % 8 == 0 && d.value_dim % 8 == 0 && eights(in.q, in.kv, in.k_shared)};
  a.offsets = in.documents.gpu_offsets, a.key_offsets = in.key_documents.gpu_offsets;
  a.q = in.q.gpu<bf16>(), a.kv = in.kv.gpu<bf16>(), a.k_shared = in.k_shared.gpu<bf16>();
  a.shared_stride = in.k_shared.row_stride();
  return a;
}

// One block of kRows queries or keys of one document and head.
struct Block {
  int64_t document;
  int64_t query_begin, key_begin;  // the document's first of each
  int queries, keys;               // of the document
  int first;                       // of the block, among them
  int64_t head;

  __device__ int position(int query) const { return keys - queries + query; }
};

enum class Side : uint8_t { queries, keys };  // what the blocks of a kernel are made of

// Document n has the numbers offsets[n] / kRows + n and following: enough for its blocks, the rest idle. So the grid
// follows from T (or Tk) and N alone.
template <int kRows, Side kSide>
__host__ __device__ int64_t block_numbers(const Arguments& a) {
  return (kSide == Side::queries ? a.tokens : a.key_tokens) / kRows + a.documents;
}

// Block `number` of a head; false for an idle number.
template <int kRows, Side kSide>
__device__ bool block_at(const Arguments& a, int64_t number, int64_t head, Block& block) {
  const int64_t* offsets = kSide == Side::queries ? a.offsets : a.key_offsets;
  int64_t low = 0, high = a.documents - 1;  // the last document with a first number up to this one
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (offsets[middle] / kRows + middle <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  block.document = low;
  block.query_begin = a.offsets[low], block.key_begin = a.key_offsets[low];
  block.queries = static_cast<int>(a.offsets[low + 1] - block.query_begin);
  block.keys = static_cast<int>(a.key_offsets[low + 1] - block.key_begin);
  block.first = static_cast<int>((number - offsets[low] / kRows - low) * kRows);
  block.head = head;
  return block.first < (kSide == Side::queries ? block.queries : block.keys);
}

// The block of this thread block. Blocks of one head follow each other: its keys and values stay in the L2 cache. Those
// of queries from the last of the documents on: they have the most keys.
template <int kRows, Side kSide>
__device__ bool find_block(const Arguments& a, Block& block) {
  constexpr bool backwards = kSide == Side::queries;
  const int64_t numbers = block_numbers<kRows, kSide>(a), in_head = blockIdx.x % numbers;
  return block_at<kRows, kSide>(a, backwards ? numbers - 1 - in_head : in_head, blockIdx.x / numbers, block);
}

// Rows of one document and head in global memory: columns [0, first) at `a`, then [0, second) at `b`.
struct Rows {
  const bf16* a;
  int64_t a_stride;
  int first;
  const bf16* b = nullptr;
  int64_t b_stride = 0;
  int second = 0;
};
__device__ inline Rows query_rows(const Arguments& a, const Block& block) {
  const int64_t width = a.key_dim();
  return {a.q + (block.query_begin * a.heads + block.head) * width, a.heads * width, static_cast<int>(width)};
}
__device__ inline Rows key_rows(const Arguments& a, const Block& block) {
  return {a.kv + (block.key_begin * a.heads + block.head) * a.kv_dim(),
          a.heads * a.kv_dim(),
          a.nope_dim,
          a.k_shared + block.key_begin * a.shared_stride,
          a.shared_stride,
          a.rope_dim};
}
__device__ inline Rows value_rows(const Arguments& a, const Block& block) {
  return {a.kv + (block.key_begin * a.heads + block.head) * a.kv_dim() + a.nope_dim, a.heads * a.kv_dim(), a.value_dim};
}
__device__ inline Rows d_output_rows(const Arguments& a, const Block& block) {
  return {a.d_o + (block.query_begin * a.heads + block.head) * a.value_dim, a.heads * a.value_dim, a.value_dim};
}

__device__ inline void copy_async(bf16* shared, const bf16* global, bool valid) {  // 16 bytes, zeros if not valid
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// Until this thread's copies have arrived; a barrier must follow before others read them.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// tile (kRows, kColumns) = rows [begin, begin + kRows) of `rows`, those at and past `end` zero. Arrives with
// wait_for_copies().
template <int kRows, int kColumns>
__device__ void load_tile(bf16* tile, const Rows& rows, int64_t begin, int64_t end, bool whole) {
  constexpr int kPieces = kColumns / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int r = i / kPieces, c = i % kPieces * 8;
    const int64_t row = begin + r;
    bf16* to = tile + r * pitch_of(kColumns) + c;
    if (whole) {
      const bool in_a = c < rows.first, valid = row < end && c < rows.first + rows.second;
      const bf16* from = in_a ? rows.a + row * rows.a_stride + c : rows.b + row * rows.b_stride + (c - rows.first);
      copy_async(to, valid ? from : rows.a, valid);
      continue;
    }
    for (int e = c; e < c + 8; ++e, ++to) {
      if (row >= end || e >= rows.first + rows.second) {
        *to = __float2bfloat16_rn(0.0f);
      } else {
        *to = e < rows.first ? rows.a[row * rows.a_stride + e] : rows.b[row * rows.b_stride + e - rows.first];
      }
    }
  }
}

// Two neighbouring columns of a row of `width`; the first is even.
__device__ inline void store_two(bf16* row, int column, int width, bool whole, float x, float y) {
  if (whole) {
    if (column < width) *reinterpret_cast<__nv_bfloat162*>(row + column) = __floats2bfloat162_rn(x, y);
    return;
  }
  if (column < width) row[column] = __float2bfloat16_rn(x);
  if (column + 1 < width) row[column + 1] = __float2bfloat16_rn(y);
}

// Calls f<DK, DV>() with the smallest tiles that hold a key and a value.
template <class F>
void choose_tiles(const Dims& d, F&& f) {
  const int64_t dk = d.key_dim(), dv = d.value_dim;
  if (dk <= 32 && dv <= 32) return f.template operator()<32, 32>();
  if (dk <= 96 && dv <= 64) return f.template operator()<96, 64>();
  f.template operator()<kMaxKeyDim, kMaxValueDim>();
}

}  // namespace tessera::ops::mla::cuda
