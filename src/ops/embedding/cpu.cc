// Embedding on the CPU. Forward copies rows, threads over tokens. Backward adds rows that may meet (one id, many
// tokens), so threads split the columns and each goes through all tokens in order: no two threads share an element, and
// the order of every sum is the order of the tokens whatever the number of threads.
#include "ops/embedding/cpu.h"

#include <algorithm>

#include "core/parallel.h"

namespace tessera::ops::embedding::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // below this a thread costs more than it saves
constexpr int64_t kLineElements = 16;        // columns of a thread come in cache lines: no line has two writers
constexpr int64_t kAhead = 8;                // rows fetched ahead: ids are scattered, the hardware cannot foresee them

template <class Real>
void forward_rows(const Dims& d, const Inputs& in, const Outputs& out) {
  const int32_t* ids = in.ids.as<int32_t>();
  parallel_ranges(d.tokens, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.width, 1)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t t = begin; t < end; ++t) {
                      std::copy_n(in.weight.as<Real>() + ids[t] * d.width, d.width, out.y.as<Real>() + t * d.width);
                    }
                  });
}

template <class Real>
void backward_columns(const Dims& d, const int32_t* ids, const Real* dy, Real* dweight, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64 / int64_t{sizeof(Real)};
  for (int64_t t = 0; t < d.tokens; ++t) {
    if (t + kAhead < d.tokens) {
      const Real* ahead = dweight + ids[t + kAhead] * d.width;
      for (int64_t i = begin; i < end; i += kLine) __builtin_prefetch(ahead + i, 1);
    }
    const Real* from = dy + t * d.width;
    Real* to = dweight + ids[t] * d.width;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) to[i] += from[i];
  }
}

}  // namespace

void forward(const Dims& d, const Inputs& in, const Outputs& out) {
  dispatch_real(in.weight.dtype(), [&](auto real) { forward_rows<decltype(real)>(d, in, out); });
}

void backward(const Dims& d, const Inputs& in, const OutputGrads& dout, const Grads& grads) {
  const int64_t lines = (d.width + kLineElements - 1) / kLineElements;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(d.tokens * kLineElements, 1));
  dispatch_real(grads.weight.dtype(), [&](auto real) {
    using Real = decltype(real);
    parallel_ranges(lines, grain, [&](int64_t begin, int64_t end) {
      backward_columns(d, in.ids.as<int32_t>(), dout.y.as<Real>(), grads.weight.as<Real>(), begin * kLineElements,
                       std::min(end * kLineElements, d.width));
    });
  });
}

}  // namespace tessera::ops::embedding::cpu
