// Backward: an item is an expert (or a segment of a crowded one), worked through in blocks of rows. With t = W2^T du,
//   dp = <h, t>,  dgate = p t o dh/dgate,  dup = p t o dh/dup,
//   dW2 += du^T (p h),  dW1 += dgate^T x,  dW3 += dup^T x,  dx = dgate W1 + dup W3
#include <algorithm>

#include "ops/experts/cpu.h"
#include "ops/experts/permute.h"
#include "ops/experts/plan.h"
#include "ops/glu/math.h"

namespace tessera::ops::experts::cpu {
namespace {

struct Item {
  int64_t expert, begin, end;  // rows
  int64_t partial;             // buffer of its weight gradients; -1: the gradients themselves
  int64_t rows() const { return end - begin; }
};
static_assert(sizeof(Item) == 4 * sizeof(int64_t));

// Items in order of expert and row.
int64_t list_items(const Dims& d, const int64_t* offsets, Item* items) {
  const int64_t segment = segment_rows(d);
  int64_t count = 0, partials = 0;
  for (int64_t e = 0; e < d.experts; ++e) {
    for (int64_t begin = offsets[e]; begin < offsets[e + 1]; begin += segment) {
      const int64_t partial = begin == offsets[e] ? -1 : partials++;
      items[count++] = {e, begin, std::min(begin + segment, offsets[e + 1]), partial};
    }
  }
  return count;
}

template <class Real>
struct WeightGrads {
  Real *w1, *w3, *w2;
};

template <class Real>
struct Backward {
  const Dims& d;
  Product product;
  const Inputs& in;
  const Saved& saved;
  const OutputGrads& dout;
  const Grads& grads;
  const BackwardWorkspace& workspace;
  int64_t unit = row_unit(dtype_of<Real>, product);

  struct Scratch {
    Real *x, *dy, *t, *dup, *h;  // (rows, L) twice, (rows, F) thrice; t becomes dgate, dy becomes dx
    void* bytes;
  };
  Scratch scratch(int64_t padded) const {
    const int64_t thread = omp_get_thread_num(), L = padded * d.width, F = padded * d.hidden;
    Real* base = workspace.reals.as<Real>() + thread * workspace.reals.row_elements();
    return {base,
            base + L,
            base + 2 * L,
            base + 2 * L + F,
            base + 2 * L + 2 * F,
            workspace.bytes.as<uint8_t>() + thread * workspace.bytes.row_elements()};
  }

  WeightGrads<Real> of_expert(int64_t e) const {
    const int64_t at = e * d.hidden * d.width;
    return {grads.w1.as<Real>() + at, grads.w3.as<Real>() + at, grads.w2.as<Real>() + at};
  }
  WeightGrads<Real> of_partial(int64_t partial) const {
    const int64_t size = d.hidden * d.width;
    Real* base = workspace.partials.as<Real>() + partial * 3 * size;
    return {base, base + size, base + 2 * size};
  }

  // One row through the activation; returns <h, t>.
  template <class Act>
  Real activation_row(const Act& act, const Real* gate, const Real* up, Real p, Real* t, Real* dup, Real* h) const {
    Real dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < d.hidden; ++i) {
      const auto value = act.derivatives(gate[i], up[i]);
      const Real t_i = t[i];
      dot += value.h * t_i;
      t[i] = p * t_i * value.gate;
      dup[i] = p * t_i * value.up;
      h[i] = p * value.h;
    }
    return dot;
  }

  template <class Act>
  void activation(const Act& act, int64_t first, int64_t count, int64_t padded, const Scratch& s) const {
    const int64_t F = d.hidden;
    const int64_t* slots = saved.slots.as<int64_t>();
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = first + r, slot = slots[row];
      grads.weights.as<Real>()[slot] =
          activation_row(act, saved.gate.as<Real>() + row * F, saved.up.as<Real>() + row * F,
                         in.weights.as<Real>()[slot], s.t + r * F, s.dup + r * F, s.h + r * F);
    }
    for (Real* rest : {s.t, s.dup, s.h}) std::fill_n(rest + count * F, (padded - count) * F, Real(0));
  }

  // Weight gradients are written (beta 0) or added to (beta 1).
  template <class Act>
  void block(const Act& act, int64_t expert, int64_t first, int64_t count, const WeightGrads<Real>& dw,
             Real beta) const {
    const int64_t L = d.width, F = d.hidden, padded = round_up(count, unit), at = expert * F * L;
    const Scratch s = scratch(padded);
    const int64_t* slots = saved.slots.as<int64_t>() + first;
    const auto product_of = [&](Trans ta, int64_t m, int64_t n, int64_t k, const Real* a, const Real* b, Real scale,
                                Real* c) {
      gemm<Real>(product, s.bytes, ta, Trans::no, m, n, k, 1, a, ta == Trans::yes ? m : k, b, n, scale, c, n);
    };
    gather_rows(d, in.x, slots, count, padded, s.x);
    gather_rows(d, dout.y, slots, count, padded, s.dy);
    product_of(Trans::no, padded, F, L, s.dy, in.w2.as<Real>() + at, 0, s.t);
    activation(act, first, count, padded, s);
    product_of(Trans::yes, L, F, padded, s.dy, s.h, beta, dw.w2);
    product_of(Trans::yes, F, L, padded, s.t, s.x, beta, dw.w1);
    product_of(Trans::yes, F, L, padded, s.dup, s.x, beta, dw.w3);
    product_of(Trans::no, padded, L, F, s.t, in.w1.as<Real>() + at, 0, s.dy);
    product_of(Trans::no, padded, L, F, s.dup, in.w3.as<Real>() + at, 1, s.dy);
    scatter_rows(d, s.dy, slots, count, workspace.dx.as<Real>());
  }

  template <class Act>
  void run_item(const Act& act, const Item& item) const {
    const WeightGrads<Real> dw = item.partial < 0 ? of_expert(item.expert) : of_partial(item.partial);
    const int64_t size = block_rows(item.rows(), unit);
    for (int64_t first = item.begin; first < item.end; first += size) {
      const bool write = item.partial >= 0 && first == item.begin;
      block(act, item.expert, first, std::min(size, item.end - first), dw, write ? Real(0) : Real(1));
    }
  }

  void add_partial(const Item& item) const {
    const WeightGrads<Real> to = of_expert(item.expert), from = of_partial(item.partial);
    parallel_ranges(d.hidden * d.width, 1 << 14, [&](int64_t begin, int64_t end) {
      const auto add = [&](const Real* a, Real* b) {
        for (int64_t i = begin; i < end; ++i) b[i] += a[i];
      };
      add(from.w1, to.w1);
      add(from.w3, to.w3);
      add(from.w2, to.w2);
    });
  }

  template <class Act>
  void run(const Act& act) const {
    const int64_t* offsets = saved.offsets.as<int64_t>();
    Item* items = reinterpret_cast<Item*>(workspace.items.as<int64_t>());
    const int64_t count = list_items(d, offsets, items);
    // The longest first, so that threads finish together.
    std::sort(items, items + count, [](const Item& a, const Item& b) {
      return a.rows() > b.rows() || (a.rows() == b.rows() && a.begin < b.begin);
    });
    parallel_items(count, [&](int64_t i) { run_item(act, items[i]); });
    std::sort(items, items + count, [](const Item& a, const Item& b) { return a.begin < b.begin; });
    for (int64_t i = 0; i < count; ++i) {
      if (items[i].partial >= 0) add_partial(items[i]);
    }
    Real* dweights = grads.weights.as<Real>();
    for (int64_t row = offsets[d.experts]; row < rows_of(d); ++row) dweights[saved.slots.as<int64_t>()[row]] = 0;
  }
};

}  // namespace

void backward(const Dims& d, Product product, const Inputs& in, const Saved& saved, const OutputGrads& dout,
              const Grads& grads, const BackwardWorkspace& workspace) {
  dispatch_real(in.x.dtype(), [&](auto real) {
    using Real = decltype(real);
    const Backward<Real> work{d, product, in, saved, dout, grads, workspace};
    glu::dispatch_activation<Real>(d.activation, [&](const auto& act) { work.run(act); });
    combine_slots<Real>(d, in.indices.as<int32_t>(), nullptr, workspace.dx.as<Real>(), grads.x);
  });
}

}  // namespace tessera::ops::experts::cpu
