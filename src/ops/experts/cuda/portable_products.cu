// Products of groups of rows for any sizes and both types, by fused multiply-add in float32: 64 x 64 tiles, 4 x 4 a
// thread, operands through shared memory 16 deep. A few TFLOP/s: for odd sizes, and to hold sm90_products.cu against.
#include "core/cuda/kernel.h"
#include "ops/experts/cuda.h"
#include "ops/experts/cuda/products.h"

namespace tessera::ops::experts::cuda::portable {
namespace {

using namespace tessera::cuda;

constexpr int kTile = 64, kDepth = 16, kThreads = 256;
static_assert(kBlockRows % kTile == 0);

// Element (i, k) lies at i * stride + k * stride_k; i < extent.
template <class T>
struct Matrix {
  const T* data;
  int64_t extent, stride, stride_k;
};

struct Shared {
  float a[kDepth][kTile + 4], b[kDepth][kTile + 4];
};

template <class T>
__device__ void load_tile(const Matrix<T>& m, int64_t k0, int64_t depth, float (&to)[kDepth][kTile + 4]) {
  for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {  // neighbouring threads along the contiguous index
    const int k = m.stride_k == 1 ? i % kDepth : i / kTile, r = m.stride_k == 1 ? i / kDepth : i % kTile;
    const bool inside = r < m.extent && k0 + k < depth;
    to[k][r] = inside ? to_float(m.data[r * m.stride + (k0 + k) * m.stride_k]) : 0.0f;
  }
}

// sums += a b^T over `depth`; thread (y, x) of 16 x 16 owns rows 4 y and columns 4 x on.
template <class T>
__device__ void accumulate(const Matrix<T>& a, const Matrix<T>& b, int64_t depth, Shared& shared, float (&sums)[4][4]) {
  const int y = int(threadIdx.x) / 16 * 4, x = int(threadIdx.x) % 16 * 4;
  for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
    __syncthreads();
    load_tile(a, k0, depth, shared.a);
    load_tile(b, k0, depth, shared.b);
    __syncthreads();
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += shared.a[k][y + i] * shared.b[k][x + j];
      }
    }
  }
}

template <class T>
struct Operands {
  const T *a, *b;
};

// One tile of c (R, N), `across` tiles beside each other. `transposed`: b_e is (N, K), else (K, N).
template <class T>
__global__ void __launch_bounds__(kThreads)
    by_rows(Operands<T> first, Operands<T> second, int terms, bool transposed, const int32_t* blocks, int64_t width,
            int64_t across, int64_t depth, T* c) {
  __shared__ Shared shared;
  const int64_t row = blockIdx.x / across * kTile, column = blockIdx.x % across * kTile;
  const int64_t expert = blocks[row / kBlockRows];
  if (expert < 0) return;
  float sums[4][4] = {};
  for (int t = 0; t < terms; ++t) {
    const Operands<T>& term = t == 0 ? first : second;
    const T* b = term.b + expert * width * depth;
    const Matrix<T> rows{term.a + row * depth, kTile, depth, 1};
    const Matrix<T> weights = transposed ? Matrix<T>{b + column * depth, width - column, depth, 1}
                                         : Matrix<T>{b + column, width - column, 1, width};
    accumulate(rows, weights, depth, shared, sums);
  }
  const int y = int(threadIdx.x) / 16 * 4, x = int(threadIdx.x) % 16 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (column + x + j < width) c[(row + y + i) * width + column + x + j] = from_float<T>(sums[i][j]);
    }
  }
}

// One of `down` by `across` tiles of c_e (M, N), added to.
template <class T>
__global__ void __launch_bounds__(kThreads)
    by_experts(Operands<T> term, const int64_t* offsets, const int64_t* counts, int64_t height, int64_t width,
               int64_t down, int64_t across, float* c) {
  __shared__ Shared shared;
  const int64_t tiles = down * across;
  const int64_t expert = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t row = tile / across * kTile, column = tile % across * kTile, first = offsets[expert];
  if (counts[expert] == 0) return;
  float sums[4][4] = {};
  accumulate(Matrix<T>{term.a + first * height + row, height - row, 1, height},
             Matrix<T>{term.b + first * width + column, width - column, 1, width}, counts[expert], shared, sums);
  const int y = int(threadIdx.x) / 16 * 4, x = int(threadIdx.x) % 16 * 4;
  float* to = c + expert * height * width;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t r = row + y + i, n = column + x + j;
      if (r < height && n < width) to[r * width + n] += sums[i][j];
    }
  }
}

template <class T>
void multiply_of(GpuStream stream, const Groups& groups, Form form, Terms terms) {
  const auto operands = [](const Term& t) { return Operands<T>{t.a.gpu<T>(), t.b.gpu<T>()}; };
  const auto rows = [&](const Term& first, const Term& second, int count) {
    const int64_t width = first.c.dim(1), across = ceil_div(width, kTile);
    launch(by_rows<T>, groups.rows / kTile * across, kThreads, 0, stream)(
        operands(first), operands(second), count, form == Form::transposed, groups.blocks.gpu<int32_t>(), width, across,
        first.a.dim(1), first.c.gpu<T>());
  };
  if (form == Form::plain_sum) return rows(*terms.begin(), *(terms.end() - 1), int(terms.size()));
  for (const Term& t : terms) {
    if (form != Form::gradient) {
      rows(t, t, 1);
      continue;
    }
    const int64_t height = t.c.dim(1), width = t.c.dim(2), down = ceil_div(height, kTile),
                  across = ceil_div(width, kTile);
    launch(by_experts<T>, groups.experts * down * across, kThreads, 0, stream)(
        operands(t), groups.offsets.gpu<int64_t>(), groups.counts.gpu<int64_t>(), height, width, down, across,
        t.c.gpu<float>());
  }
}

}  // namespace

void multiply(GpuStream stream, const Groups& groups, Form form, Terms terms) {
  dispatch(terms.begin()->a.dtype(),
           [&](auto element) { multiply_of<decltype(element)>(stream, groups, form, terms); });
}

}  // namespace tessera::ops::experts::cuda::portable
