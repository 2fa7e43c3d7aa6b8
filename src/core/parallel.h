// The thread pool: OpenMP's, shared with oneDNN. Work is split in contiguous ranges by thread number, so results never
// depend on timing; sums across ranges are the caller's business and must be taken in a fixed order.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace tessera {

inline int thread_count() { return omp_get_max_threads(); }
inline void set_thread_count(int threads) { omp_set_num_threads(threads); }

// Calls f(begin, end) on disjoint ranges that cover [0, n), at least `grain` long each. An f that throws ends the call
// (one exception is carried to the caller).
template <class F>
void parallel_ranges(int64_t n, int64_t grain, F&& f) {
  const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, thread_count());
  if (parts == 1 || omp_in_parallel()) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  std::exception_ptr first;
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1)
  for (int64_t p = 0; p < parts; ++p) {
    try {
      f(n * p / parts, n * (p + 1) / parts);
    } catch (...) {
#pragma omp critical
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

// Calls f(i) for every i in [0, n); items are handed out one at a time, for items of uneven cost. Each item must write
// only its own output, so that the hand-out order cannot matter.
template <class F>
void parallel_items(int64_t n, F&& f) {
  if (n <= 1 || omp_in_parallel()) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::exception_ptr first;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < n; ++i) {
    try {
      f(i);
    } catch (...) {
#pragma omp critical
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera
