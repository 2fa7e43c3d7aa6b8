// What the processes of a step must know together before any of them judges it: counts of the routers and the largest
// logits, over everyone who saw other tokens. Integer sums, so that no sharding changes a bias (moe.md 2.2).
#pragma once

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "dist/mesh.h"
#include "model/model.h"

namespace tessera::train {

// Counters become their sums along the replica axis, max_logit the maximum. Histograms hold the counts of earlier steps
// where a layer has yet to see enough tokens: those must lie on the first process of the axis alone.
void sum_record(dist::Communicator& replica, const model::StepRecord&);
// After a step that did not move the bias: what stays goes on on the first process of the axis.
void keep_histogram_once(const dist::Communicator& replica, const ops::router::Counters&);

// What every process has, in their order: along a pipeline, of the layers of each.
template <class Row>
std::vector<Row> gather_rows(dist::Communicator& axis, const std::vector<Row>& own) {
  static_assert(std::is_trivially_copyable_v<Row>);
  std::vector<Row> all;
  const std::string bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(Row));
  for (const std::string& of_one : axis.all_gather(bytes)) {
    const size_t before = all.size();
    all.resize(before + of_one.size() / sizeof(Row));
    if (!of_one.empty()) std::memcpy(all.data() + before, of_one.data(), of_one.size());
  }
  return all;
}

}  // namespace tessera::train
