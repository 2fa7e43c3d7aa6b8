// Rows of the expert exchange on the GPU: one read and one write of every row, and for sums one more read. A thread
// moves the widest word that rows are made of, or adds eight elements; an index has one row to itself, so that sums
// need no atomics.
#include "core/cuda/kernel.h"
#include "dist/cuda.h"

namespace tessera::dist::cuda {
namespace {

using namespace tessera::cuda;

constexpr int kThreads = 256;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather(const Word* from, const int64_t* index, Word* to, int64_t words, int64_t words_of_row) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < words) to[i] = from[index[i / words_of_row] * words_of_row + i % words_of_row];
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    add(const T* from, const int64_t* index, T* to, int64_t rows, int64_t width, int64_t pieces, bool whole) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / pieces, column = i % pieces * 8;
  if (row >= rows) return;
  float x[8], y[8];
  T* sum = to + index[row] * width + column;
  load8(from + row * width + column, width - column, whole, x);
  load8(sum, width - column, whole, y);
#pragma unroll
  for (int e = 0; e < 8; ++e) y[e] += x[e];
  store8(sum, width - column, whole, y);
}

__global__ void __launch_bounds__(kThreads) keep(int32_t begin, int32_t count, int32_t* indices, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const int32_t own = indices[i] - begin;
  indices[i] = own >= 0 && own < count ? own : -1;
}

template <class Word>
void gather_words(GpuStream stream, const View& from, const View& index, const View& to) {
  const int64_t words = to.bytes() / int64_t(sizeof(Word));
  if (words == 0) return;
  launch(gather<Word>, ceil_div(words, kThreads), kThreads, 0, stream)(
      static_cast<const Word*>(from.data()), index.gpu<int64_t>(), static_cast<Word*>(to.data()), words,
      words / to.rows());
}

}  // namespace

void gather_rows(GpuStream stream, const View& from, const View& index, const View& to) {
  const int64_t row_bytes = to.row_elements() * bytes_of(to.dtype());
  const bool wide = row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(from.data()) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(to.data()) % 16 == 0;
  if (wide) return gather_words<uint4>(stream, from, index, to);
  if (row_bytes % 4 == 0) return gather_words<uint32_t>(stream, from, index, to);
  gather_words<uint16_t>(stream, from, index, to);
}

void add_rows(GpuStream stream, const View& from, const View& index, const View& to) {
  const int64_t rows = from.rows(), width = from.row_elements(), pieces = ceil_div(width, 8);
  dispatch(to.dtype(), [&](auto real) {
    using T = decltype(real);
    launch(add<T>, ceil_div(rows * pieces, kThreads), kThreads, 0, stream)(
        from.gpu<T>(), index.gpu<int64_t>(), to.gpu<T>(), rows, width, pieces, eights(from, to));
  });
}

void keep_own(GpuStream stream, int32_t begin, int32_t count, const View& indices) {
  const int64_t n = indices.elements();
  launch(keep, ceil_div(n, kThreads), kThreads, 0, stream)(begin, count, indices.gpu<int32_t>(), n);
}

}  // namespace tessera::dist::cuda
