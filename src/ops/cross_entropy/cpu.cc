// Output head and cross-entropy on the CPU. Per block of rows, with G = scale (softmax(logits) - onehot(target)):
//
//   logits = x W^T;   loss = log sum exp(logits) - logits[target];   dx = G W;   dW += G^T x
//
// A row of logits (32000 x 4 bytes) fits a core's L2: maximum, exponentials and gradient of a row are taken in turn, so
// that memory sees one read and one write of the block.
#include "ops/cross_entropy/cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/fast_math.h"
#include "core/parallel.h"
#include "ops/gemm/gemm.h"

namespace tessera::ops::cross_entropy::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 13;  // below this a thread costs more than it saves

int64_t grain(const Dims& d) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.vocabulary, 1)); }

template <class Real>
Real maximum(const Real* row, int64_t n) {
  Real top = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = row[i] > top ? row[i] : top;
  return top;
}

// log sum exp(row) - row[target]. The two large terms, maximum and target, are subtracted first and exactly when they
// are equal: log(sum) alone then decides, however large the logits.
template <class Real>
Real loss_of(Real top, Real sum, Real target) {
  return (top - target) + std::log(sum);
}

template <class Real>
Real loss_row(const Real* row, int64_t n, int32_t target) {
  const Real top = maximum(row, n);
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += fast::exp(row[i] - top);
  return loss_of(top, sum, row[target]);
}

// As loss_row; the row becomes scale (softmax - onehot).
template <class Real>
Real loss_and_gradient_row(Real* row, int64_t n, int32_t target, Real scale) {
  const Real top = maximum(row, n), logit = row[target];
  Real sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    row[i] = fast::exp(row[i] - top);
    sum += row[i];
  }
  const Real factor = scale / sum;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) row[i] *= factor;
  row[target] -= scale;
  return loss_of(top, sum, logit);
}

// Calls f(row, target) for the rows of the block that begins at token `begin` and have a target, and writes the loss it
// returns; `without` is called for the other rows.
template <class Real, class F, class G>
void for_rows(const Dims& d, const Inputs& in, const Outputs& out, int64_t begin, int64_t count, Real* logits, F&& f,
              G&& without) {
  const int32_t* targets = in.targets.as<int32_t>() + begin;
  Real* loss = out.loss.as<Real>() + begin;
  parallel_ranges(count, grain(d), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      Real* row = logits + r * d.vocabulary;
      TESSERA_CHECK(targets[r] >= -1 && targets[r] < d.vocabulary, "cross_entropy target {} at token {}, vocabulary {}",
                    targets[r], begin + r, d.vocabulary);
      if (targets[r] < 0) {
        loss[r] = 0;
        without(row);
      } else {
        loss[r] = f(row, targets[r]);
      }
    }
  });
}

// Calls f(begin, count) for each block of rows; the last may be short.
template <class F>
void for_blocks(const Dims& d, F&& f) {
  for (int64_t begin = 0; begin < d.tokens; begin += d.block_rows) f(begin, std::min(d.block_rows, d.tokens - begin));
}

template <class Real>
void logits_of_block(const Dims& d, const Inputs& in, int64_t begin, int64_t count, Product product,
                     const Workspace& workspace) {
  gemm<Real>(product, workspace.scratch.data(), Trans::no, Trans::yes, count, d.vocabulary, d.width, 1,
             in.x.as<Real>() + begin * d.width, d.width, in.weight.as<Real>(), d.width, 0, workspace.logits.as<Real>(),
             d.vocabulary);
}

template <class Real>
void forward_blocks(const Dims& d, const Inputs& in, const Outputs& out, Product product, const Workspace& workspace) {
  Real* logits = workspace.logits.as<Real>();
  for_blocks(d, [&](int64_t begin, int64_t count) {
    logits_of_block<Real>(d, in, begin, count, product, workspace);
    for_rows(
        d, in, out, begin, count, logits,
        [&](const Real* row, int32_t target) { return loss_row(row, d.vocabulary, target); }, [](const Real*) {});
  });
}

template <class Real>
void forward_backward_blocks(const Dims& d, const Inputs& in, Real scale, const Outputs& out, const Grads& grads,
                             Product product, const Workspace& workspace) {
  Real* logits = workspace.logits.as<Real>();
  void* scratch = workspace.scratch.data();
  for_blocks(d, [&](int64_t begin, int64_t count) {
    logits_of_block<Real>(d, in, begin, count, product, workspace);
    for_rows(
        d, in, out, begin, count, logits,
        [&](Real* row, int32_t target) { return loss_and_gradient_row(row, d.vocabulary, target, scale); },
        [&](Real* row) { std::fill_n(row, d.vocabulary, Real(0)); });
    gemm<Real>(product, scratch, Trans::no, Trans::no, count, d.width, d.vocabulary, 1, logits, d.vocabulary,
               in.weight.as<Real>(), d.width, 0, grads.x.as<Real>() + begin * d.width, d.width);
    gemm<Real>(product, scratch, Trans::yes, Trans::no, d.vocabulary, d.width, count, 1, logits, d.vocabulary,
               in.x.as<Real>() + begin * d.width, d.width, 1, grads.weight.as<Real>(), d.width);
  });
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out, Product product, const Workspace& workspace) {
  dispatch_real(in.x.dtype(), [&](auto real) { forward_blocks<decltype(real)>(d, in, out, product, workspace); });
}

void forward_backward(const Dims& d, const Inputs& in, double scale, const Outputs& out, const Grads& grads,
                      Product product, const Workspace& workspace) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    forward_backward_blocks<Real>(d, in, Real(scale), out, grads, product, workspace);
  });
}

}  // namespace tessera::ops::cross_entropy::cpu
