#include "optim/newton_schulz.h"

#include <algorithm>
#include <utility>

#include "core/arena.h"
#include "core/parallel.h"
#include "ops/gemm/gemm.h"

namespace tessera::optim {
namespace {

using ops::Trans;

constexpr double kC1 = 3.4445, kC2 = -4.7750, kC3 = 2.0315;
constexpr int64_t kTileRows = 256, kTileCols = 512;  // wide enough that packing operands anew for a tile is cheap

// Keeps a product on the calling thread even outside a parallel region.
class OneThread {
 public:
  OneThread() : threads_(thread_count()) { set_thread_count(1); }
  ~OneThread() { set_thread_count(threads_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_;
};

// Rows of a panel of a symmetric (n, n) product: p panels skip (p - 1) / 2p of the work, at most half. Smaller GEMMs
// are slower (78 to 101 GFLOP/s a core for 64 x 64 x 128, 113 for 128 cubed), so below n = 128 nothing is left to gain;
// the whole iteration gains 6 to 10 % at n = 128 and 20 % at 256 and 512.
int64_t panel_rows(int64_t n) { return n < 128 ? n : std::clamp<int64_t>((n / 4 + 15) / 16 * 16, 64, 256); }

// Copies c[begin:end, 0:begin] to its transposed place, in blocks whose lines stay in the first-level cache.
template <class Real>
void mirror(int64_t begin, int64_t end, int64_t n, Real* c) {
  constexpr int64_t kBlock = 16;
  for (int64_t i0 = begin; i0 < end; i0 += kBlock) {
    const int64_t rows = std::min(kBlock, end - i0);
    for (int64_t j0 = 0; j0 < begin; j0 += kBlock) {  // begin is a multiple of kBlock
      const Real* from = c + i0 * n + j0;
      Real* to = c + j0 * n + i0;
      for (int64_t j = 0; j < kBlock; ++j) {
        for (int64_t i = 0; i < rows; ++i) to[j * n + i] = from[i * n + j];
      }
    }
  }
}

// c (n, n) = op_a(x) op_b(x) for a symmetric result: every panel of rows is computed up to its diagonal, given to
// finish(row_begin, row_end) while it is in cache, and mirrored.
template <class Real, class Finish>
void symmetric_product(Trans trans_a, Trans trans_b, int64_t n, int64_t k, const Real* x, int64_t ld, Real* c,
                       Finish&& finish) {
  const int64_t height = panel_rows(n), panels = (n + height - 1) / height;
  parallel_items(panels, [&](int64_t item) {
    const int64_t begin = (panels - 1 - item) * height, end = std::min(n, begin + height);  // the longest first
    const Real* rows = x + (trans_a == Trans::yes ? begin : begin * ld);
    {
      const OneThread one;
      ops::gemm<Real>(trans_a, trans_b, end - begin, end, k, Real(1), rows, ld, x, ld, Real(0), c + begin * n, n);
    }
    finish(begin, end);
    mirror(begin, end, n, c);
  });
}

// y (m, n) = a (m, k) b (k, n), in tiles.
template <class Real>
void product(int64_t m, int64_t n, int64_t k, const Real* a, const Real* b, Real* y) {
  const int64_t down = (m + kTileRows - 1) / kTileRows, across = (n + kTileCols - 1) / kTileCols;
  parallel_items(down * across, [&](int64_t tile) {
    const int64_t i = tile / across * kTileRows, j = tile % across * kTileCols;
    const OneThread one;
    ops::gemm<Real>(Trans::no, Trans::no, std::min(kTileRows, m - i), std::min(kTileCols, n - j), k, Real(1), a + i * k,
                    k, b + j, n, Real(0), y + i * n + j, n);
  });
}

int64_t padded(int64_t elements, int64_t element_bytes) {
  return Arena::aligned(elements * element_bytes) / element_bytes;
}

}  // namespace

int64_t newton_schulz_workspace_elements(int64_t rows, int64_t cols, DType dtype) {
  const int64_t n = std::min(rows, cols), bytes = bytes_of(dtype);
  return 2 * padded(rows * cols, bytes) + 2 * padded(n * n, bytes);
}

template <class Real>
NewtonSchulzWorkspace<Real> carve_newton_schulz(Real* memory, int64_t rows, int64_t cols) {
  const int64_t n = std::min(rows, cols), bytes = static_cast<int64_t>(sizeof(Real));
  const int64_t matrix = padded(rows * cols, bytes), square = padded(n * n, bytes);
  return {memory, memory + matrix, memory + 2 * matrix, memory + 2 * matrix + square};
}

template <class Real>
Real* newton_schulz(int64_t rows, int64_t cols, int64_t steps, const NewtonSchulzWorkspace<Real>& w) {
  const bool transposed = rows > cols;
  const int64_t n = std::min(rows, cols), k = std::max(rows, cols);
  Real *x = w.x, *next = w.next;
  // b = c3 a a, then + c2 a + c1 I: with c1 on the diagonal the last product needs no second operand.
  const auto polynomial = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
#pragma omp simd
      for (int64_t j = 0; j < end; ++j) w.b[i * n + j] = Real(kC3) * w.b[i * n + j] + Real(kC2) * w.a[i * n + j];
      w.b[i * n + i] += Real(kC1);
    }
  };
  for (int64_t s = 0; s < steps; ++s) {
    symmetric_product<Real>(transposed ? Trans::yes : Trans::no, transposed ? Trans::no : Trans::yes, n, k, x, cols,
                            w.a, [](int64_t, int64_t) {});
    symmetric_product<Real>(Trans::no, Trans::no, n, n, w.a, n, w.b, polynomial);
    if (transposed) {
      product<Real>(rows, cols, n, x, w.b, next);
    } else {
      product<Real>(rows, cols, n, w.b, x, next);
    }
    std::swap(x, next);
  }
  return x;
}

int64_t newton_schulz_flops(int64_t rows, int64_t cols, int64_t steps) {
  const int64_t a = std::min(rows, cols), b = std::max(rows, cols);
  return steps * (4 * a * a * b + 2 * a * a * a);
}

template NewtonSchulzWorkspace<float> carve_newton_schulz(float*, int64_t, int64_t);
template NewtonSchulzWorkspace<double> carve_newton_schulz(double*, int64_t, int64_t);
template float* newton_schulz(int64_t, int64_t, int64_t, const NewtonSchulzWorkspace<float>&);
template double* newton_schulz(int64_t, int64_t, int64_t, const NewtonSchulzWorkspace<double>&);

}  // namespace tessera::optim
