// Embedding on the GPU. Forward copies rows, 2 elements of traffic an element. Backward adds rows that may meet,
// without atomics: it sorts the tokens by id and goes through tiles of kSumTile sorted tokens, whose rows a thread adds
// in order, 8 columns of them, with kAhead rows in flight. An id whose tokens all lie in one tile has its sum there. An
// id that goes over a border leaves a sum in each tile it touches, and a second kernel adds those in order: a frequent
// word has thousands of tokens, too many to be added one after the other. Either way one thread adds to an element of
// dweight, and the order of every sum follows from the ids alone. Floor: one read of dy, and of dweight a read and a
// write of the rows that occur.
#include "core/cuda/kernel.h"
#include "ops/embedding/cuda.h"
#include "ops/embedding/cuda/sort.h"

namespace tessera::ops::embedding::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kCopyThreads = 256;
constexpr int kThreads = 64;  // of a tile of the backward, 8 columns each
constexpr int kAhead = 8;

template <class T>
__global__ void __launch_bounds__(kCopyThreads)
    forward_kernel(const int32_t* ids, const T* weight, T* y, int64_t tokens, int64_t width, int64_t pieces,
                   bool whole) {
  const uint64_t i = uint64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
  const int64_t t = int64_t(i / uint64_t(pieces)), c = int64_t(i % uint64_t(pieces)) * 8;
  if (t >= tokens) return;
  float row[8];
  load8(weight + ids[t] * width + c, width - c, whole, row);
  store8(y + t * width + c, width - c, whole, row);
}

template <class T>
struct Arguments {
  int64_t tokens, width, column_blocks, tiles;
  bool whole;  // rows can be read eight elements at a time
  Sorted sorted;
  const T* dy;
  float *dweight, *leading, *trailing;

  template <class E>
  __device__ void load(const E* rows, int64_t row, int64_t column, float (&to)[8]) const {
    load8(rows + row * width + column, width - column, whole, to);
  }
  __device__ void store(float* rows, int64_t row, int64_t column, const float (&from)[8]) const {
    store8(rows + row * width + column, width - column, whole, from);
  }
  __device__ void add(int64_t id, int64_t column, const float (&sum)[8]) const {
    float row[8];
    load(dweight, id, column, row);
#pragma unroll
    for (int i = 0; i < 8; ++i) row[i] += sum[i];
    store(dweight, id, column, row);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) sum_tiles(Arguments<T> a) {
  __shared__ int ids[kSumTile + 2];  // with the neighbours on both sides, -1 where there are none
  __shared__ int tokens[kSumTile];
  const int64_t tile = blockIdx.x / a.column_blocks, first = tile * kSumTile;
  const int64_t column = (blockIdx.x % a.column_blocks * kThreads + threadIdx.x) * 8;
  const int count = int(min(int64_t(kSumTile), a.tokens - first));
  for (int e = threadIdx.x; e < count + 2; e += kThreads) {
    const int64_t position = first - 1 + e;
    ids[e] = position >= 0 && position < a.tokens ? a.sorted.ids[position] : -1;
    if (e < count) tokens[e] = a.sorted.tokens[first + e];
  }
  __syncthreads();
  if (column >= a.width) return;
  bool from_before = ids[0] == ids[1];
  float sum[8] = {};
  for (int base = 0; base < count; base += kAhead) {
    float rows[kAhead][8];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (base + k < count) a.load(a.dy, tokens[base + k], column, rows[k]);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int at = base + k;
      if (at >= count) break;
      const int id = ids[at + 1];
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += rows[k][i];
      const bool goes_on = ids[at + 2] == id;
      if (goes_on && at + 1 < count) continue;
      if (from_before) {
        a.store(a.leading, tile, column, sum);
      } else if (goes_on) {
        a.store(a.trailing, tile, column, sum);
      } else {
        a.add(id, column, sum);
      }
      from_before = false;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = 0;
    }
  }
}

// The id that begins in a tile and goes on behind it: the sum of that tile, then of those it goes through, in order.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_over_borders(Arguments<T> a) {
  const int64_t tile = blockIdx.x / a.column_blocks, first = tile * kSumTile, behind = first + kSumTile;
  const int64_t column = (blockIdx.x % a.column_blocks * kThreads + threadIdx.x) * 8;
  if (column >= a.width || behind >= a.tokens) return;
  const int32_t* ids = a.sorted.ids;
  const int32_t id = ids[behind];
  if (ids[behind - 1] != id) return;
  if (first > 0 && ids[first - 1] == id) return;  // began before
  int64_t last = tile + 1, after = a.tiles;       // last begins with the id; after does not, or is no tile
  while (after - last > 1) {
    const int64_t middle = (last + after) / 2;
    if (ids[middle * kSumTile] == id) {
      last = middle;
    } else {
      after = middle;
    }
  }
  float sum[8];
  a.load(a.trailing, tile, column, sum);
#pragma unroll 8
  for (int64_t t = tile + 1; t <= last; ++t) {
    float part[8];
    a.load(a.leading, t, column, part);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += part[i];
  }
  a.add(id, column, sum);
}

}  // namespace

void forward(GpuStream stream, const Dims& d, const Inputs& in, const Outputs& out) {
  dispatch(in.weight.dtype(), [&](auto element) {
    using T = decltype(element);
    const int64_t pieces = ceil_div(d.width, 8);
    launch(forward_kernel<T>, ceil_div(d.tokens * pieces, kCopyThreads), kCopyThreads, 0, stream)(
        in.ids.gpu<int32_t>(), in.weight.gpu<T>(), out.y.gpu<T>(), d.tokens, d.width, pieces, eights(in.weight, out.y));
  });
}

void backward(GpuStream stream, const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads,
              const Workspace& w) {
  if (d.tokens == 0) return;
  const Sorted sorted = sort_by_id(stream, d, in.ids.gpu<int32_t>(), w);
  dispatch(dout.y.dtype(), [&](auto element) {
    using T = decltype(element);
    const Arguments<T> a{.tokens = d.tokens,
                         .width = d.width,
                         .column_blocks = ceil_div(d.width, kThreads * 8),
                         .tiles = ceil_div(d.tokens, kSumTile),
                         .whole = eights(dout.y, grads.weight, w.leading, w.trailing),
                         .sorted = sorted,
                         .dy = dout.y.gpu<T>(),
                         .dweight = grads.weight.gpu<float>(),
                         .leading = w.leading.gpu<float>(),
                         .trailing = w.trailing.gpu<float>()};
    launch(sum_tiles<T>, a.tiles * a.column_blocks, kThreads, 0, stream)(a);
    launch(sum_over_borders<T>, a.tiles * a.column_blocks, kThreads, 0, stream)(a);
  });
}

}  // namespace tessera::ops::embedding::cuda
