// Forward: blocks of an expert's rows are independent items.
#include <algorithm>

#include "ops/experts/cpu.h"
#include "ops/experts/permute.h"
#include "ops/experts/plan.h"
#include "ops/glu/math.h"

namespace tessera::ops::experts::cpu {
namespace {

template <class Real>
struct Forward {
  const Dims& d;
  Product product;
  const Inputs& in;
  const Saved* saved;
  const ForwardWorkspace& workspace;
  int64_t unit = row_unit(dtype_of<Real>, product);

  // h over gate, rows [0, count); keeps the pre-activations of rows from `first` if they are wanted.
  template <class Act>
  void activate(const Act& act, int64_t first, int64_t count, Real* gate, const Real* up) const {
    const int64_t n = count * d.hidden;
    if (saved != nullptr) {
      std::copy_n(gate, n, saved->gate.template as<Real>() + first * d.hidden);
      std::copy_n(up, n, saved->up.template as<Real>() + first * d.hidden);
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) gate[i] = act.value(gate[i], up[i]);
  }

  template <class Act>
  void block(const Act& act, int64_t expert, int64_t first, int64_t count) const {
    const int64_t L = d.width, F = d.hidden, padded = round_up(count, unit);
    const int64_t thread = omp_get_thread_num();
    Real* x = workspace.reals.as<Real>() + thread * workspace.reals.row_elements();
    Real *gate = x + padded * L, *up = gate + padded * F;
    void* bytes = workspace.bytes.as<uint8_t>() + thread * workspace.bytes.row_elements();
    const int64_t* slots = workspace.slots.as<int64_t>() + first;
    const auto weight = [&](const View& w) { return w.as<Real>() + expert * F * L; };
    const auto times_transposed = [&](const Real* a, int64_t k, const View& w, int64_t n, Real* c) {
      gemm<Real>(product, bytes, Trans::no, Trans::yes, padded, n, k, 1, a, k, weight(w), k, 0, c, n);
    };
    gather_rows(d, in.x, slots, count, padded, x);
    times_transposed(x, L, in.w1, F, gate);
    times_transposed(x, L, in.w3, F, up);
    activate(act, first, count, gate, up);
    times_transposed(gate, F, in.w2, L, x);
    scatter_rows(d, x, slots, count, workspace.y.as<Real>());
  }

  template <class Act>
  void run(const Act& act) const {
    const int64_t* offsets = workspace.offsets.as<int64_t>();
    int64_t* blocks = workspace.blocks.as<int64_t>();
    blocks[0] = 0;
    for (int64_t e = 0; e < d.experts; ++e) blocks[e + 1] = blocks[e] + block_count(offsets[e + 1] - offsets[e]);
    parallel_items(blocks[d.experts], [&](int64_t item) {
      const int64_t e = std::upper_bound(blocks, blocks + d.experts + 1, item) - blocks - 1;
      const int64_t size = block_rows(offsets[e + 1] - offsets[e], unit);
      const int64_t first = offsets[e] + (item - blocks[e]) * size;
      block(act, e, first, std::min(size, offsets[e + 1] - first));
    });
  }
};

// Each expert's rows are summed by one thread, in order.
template <class Real>
void add_squares(const Dims& d, const ForwardWorkspace& workspace, const View& squares) {
  const int64_t *offsets = workspace.offsets.as<int64_t>(), *slots = workspace.slots.as<int64_t>();
  parallel_items(d.experts, [&](int64_t e) {
    double sum = 0;
    for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
      const Real* y = workspace.y.as<Real>() + slots[row] * d.width;
      double of_row = 0;
#pragma omp simd reduction(+ : of_row)
      for (int64_t i = 0; i < d.width; ++i) of_row += double(y[i]) * double(y[i]);
      sum += of_row;
    }
    squares.as<double>()[e] += sum;
  });
}

}  // namespace

void forward(const Dims& d, Product product, const Inputs& in, const Outputs& out, Saved* saved,
             const ForwardWorkspace& workspace) {
  order_by_expert(d, in.indices, workspace.slots, workspace.offsets, workspace.cursor);
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    const Forward<Real> work{d, product, in, saved, workspace};
    glu::dispatch_activation<Real>(d.activation, [&](const auto& act) { work.run(act); });
    if (out.squares.present()) add_squares<Real>(d, workspace, out.squares);
    combine_slots(d, in.indices.as<int32_t>(), in.weights.as<Real>(), workspace.y.as<Real>(), out.y);
  });
}

}  // namespace tessera::ops::experts::cpu
