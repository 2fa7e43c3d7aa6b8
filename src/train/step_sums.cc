#include "train/step_sums.h"

#include <algorithm>
#include <deque>

#include "core/host_copy.h"

namespace tessera::train {
namespace {

// Views of one type, anywhere, as one range of the host: one message instead of one a layer.
class Fused {
 public:
  void add(const View& view) {
    if (view.present()) copies_.emplace_back(view);
  }
  template <class F>
  void exchange(DType dtype, F&& f) {
    int64_t elements = 0;
    for (const HostCopy& c : copies_) elements += c.view().elements();
    std::vector<std::byte> bytes(static_cast<size_t>(elements * bytes_of(dtype)));
    const View all(bytes.data(), dtype, {elements});
    const auto each = [&](auto&& g) {
      int64_t begin = 0;
      for (const HostCopy& c : copies_) {
        g(c, all.row_range(begin, c.view().elements()).reshaped(c.view().shape()));
        begin += c.view().elements();
      }
    };
    each([](const HostCopy& c, const View& room) { copy(c.view(), room); });
    f(all);
    each([](const HostCopy& c, const View& room) {
      copy(room, c.view());
      c.put_back();
    });
  }

 private:
  std::deque<HostCopy> copies_;
};

void raise_to_largest(dist::Communicator& axis, const View& values) {
  const int64_t n = values.elements();
  std::vector<float> everyones(static_cast<size_t>(n * axis.size()));
  const View all(everyones.data(), DType::f32, {axis.size(), n});
  copy(values, all.at(axis.rank()));
  axis.all_gather(all);
  float* largest = values.as<float>();
  for (size_t i = 0; i < everyones.size(); ++i) largest[i % size_t(n)] = std::max(largest[i % size_t(n)], everyones[i]);
}

}  // namespace

void sum_record(dist::Communicator& replica, const model::StepRecord& record) {
  if (replica.alone()) return;
  Fused wide, real, narrow, logits;
  for (const ops::router::Counters& c : record.counters) {
    for (const View& v : {c.load, c.by_bias, c.tokens, c.invalid}) wide.add(v);
    for (const View& v : {c.weight, c.output_squares}) real.add(v);
    narrow.add(c.histogram);
  }
  for (const View& v : record.max_logit) logits.add(v);
  wide.exchange(DType::i64, [&](const View& all) { replica.all_reduce(all); });
  real.exchange(DType::f64, [&](const View& all) { replica.all_reduce(all); });
  narrow.exchange(DType::i32, [&](const View& all) { replica.all_reduce(all); });
  logits.exchange(DType::f32, [&](const View& all) { raise_to_largest(replica, all); });
}

void keep_histogram_once(const dist::Communicator& replica, const ops::router::Counters& counters) {
  if (replica.rank() != 0 && counters.histogram.present()) counters.histogram.zero();
}

}  // namespace tessera::train
