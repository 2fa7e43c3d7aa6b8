#include "optim/parts.h"

#include <algorithm>
#include <numeric>

#include "optim/batches.h"

namespace tessera::optim {
namespace {

int64_t rows_of_block(const Slot& s) { return s.value.rows() / s.blocks; }

// [n p / count, n (p + 1) / count) of what can be cut, as rows; empty ranges are left out.
void cut(size_t slot, int64_t pieces, int64_t rows_each, int64_t count, std::vector<Part>& parts) {
  for (int64_t p = 0; p < count; ++p) {
    const int64_t begin = pieces * p / count, end = pieces * (p + 1) / count;
    if (begin < end) parts.push_back({slot, begin * rows_each, (end - begin) * rows_each, static_cast<int>(p)});
  }
}

// Multiply-adds of the products of one Newton-Schulz step, up to a factor.
double work_of(const Slot& s, const Part& p) {
  const Matrix m = block_of(s);
  return double(p.rows / rows_of_block(s)) * double(m.elements()) * double(std::min(m.rows, m.cols));
}

void assign_longest_first(std::span<const Slot> slots, int owners, std::span<Part> parts) {
  std::vector<size_t> order(parts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto work = [&](size_t i) { return work_of(slots[parts[i].slot], parts[i]); };
  std::ranges::stable_sort(order, std::greater<>(), work);
  std::vector<double> given(static_cast<size_t>(owners), 0);
  for (size_t i : order) {
    const auto least = std::ranges::min_element(given);
    *least += work(i);
    parts[i].owner = static_cast<int>(least - given.begin());
  }
}

}  // namespace

std::vector<Part> share_out(std::span<const Slot> slots, int owners) {
  std::vector<Part> matrices, others;
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& s = slots[i];
    if (s.value.elements() == 0) {
      others.push_back({i, 0, s.value.rows(), 0});
    } else if (s.rule == Rule::muon) {
      cut(i, s.blocks, rows_of_block(s), std::min<int64_t>(owners, s.blocks), matrices);
    } else {
      cut(i, s.blocks > 1 ? s.blocks : s.value.rows(), s.blocks > 1 ? rows_of_block(s) : 1, owners, others);
    }
  }
  assign_longest_first(slots, owners, matrices);
  matrices.insert(matrices.end(), others.begin(), others.end());
  std::ranges::stable_sort(matrices, {}, &Part::slot);
  return matrices;
}

Slot part_of(const Slot& s, const Part& p) {
  Slot part = s;
  part.first_row = s.first_row + p.first_row;
  part.blocks = s.blocks > 1 ? p.rows / rows_of_block(s) : 1;
  part.value = s.value.row_range(p.first_row, p.rows);
  part.gradient = s.gradient.row_range(p.first_row, p.rows);
  if (s.copy.present()) part.copy = s.copy.row_range(p.first_row, p.rows);
  return part;
}

}  // namespace tessera::optim
