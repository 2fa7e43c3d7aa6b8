#include "dist/pipeline_schedule.h"

#include <algorithm>
#include <map>

namespace tessera::dist {

double PipelineShape::idle_share() const {
  return double(processes - 1) / double(chunks * micro_batches + processes - 1);
}

std::vector<Work> work_of(const PipelineShape& shape, int64_t process) {
  const int64_t P = shape.processes, V = shape.chunks, all = V * shape.micro_batches;
  TESSERA_CHECK(V == 1 || shape.micro_batches % P == 0, "{} micro-batches in groups of {}", shape.micro_batches, P);
  // The i-th pass in a direction: P micro-batches through each of the process's chunks, then the next P.
  const auto pass = [&](Pass direction, int64_t i) -> Work {
    if (V == 1) return {direction, process, i};
    const int64_t turn = i / P % V, of_process = direction == Pass::forward ? turn : V - 1 - turn;
    return {direction, of_process * P + process, i / (P * V) * P + i % P};
  };
  const int64_t behind = P - 1 - process;
  const int64_t ahead = std::min(V == 1 ? behind : 2 * behind + (V - 1) * P, all);
  std::vector<Work> order;
  for (int64_t i = 0; i < ahead; ++i) order.push_back(pass(Pass::forward, i));
  for (int64_t i = 0; i < all; ++i) {
    if (ahead + i < all) order.push_back(pass(Pass::forward, ahead + i));
    order.push_back(pass(Pass::backward, i));
  }
  return order;
}

namespace {

// When every pass of every process begins, each taking one tick from where its inputs are there.
class Clock {
 public:
  explicit Clock(const PipelineShape& shape) : shape_(shape) {
    const size_t passes = static_cast<size_t>(shape.all_chunks() * shape.micro_batches);
    for (std::vector<int64_t>& of_pass : begin_) of_pass.assign(passes, -1);
    std::vector<std::vector<Work>> order;
    for (int64_t p = 0; p < shape.processes; ++p) order.push_back(work_of(shape, p));
    std::vector<size_t> next(order.size(), 0);
    std::vector<int64_t> free(order.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t p = 0; p < order.size(); ++p) {
        for (; next[p] < order[p].size(); ++next[p]) {
          const int64_t ready = ready_at(order[p][next[p]]);
          if (ready < 0) break;
          const int64_t at = std::max(ready, free[p]);
          begin(order[p][next[p]]) = at;
          free[p] = at + 1;
          moved = true;
        }
      }
    }
    for (size_t p = 0; p < order.size(); ++p) {
      TESSERA_CHECK(next[p] == order[p].size(), "pipeline of {} x {} and {} micro-batches: process {} waits for ever",
                    shape.processes, shape.chunks, shape.micro_batches, p);
    }
  }

  int64_t begin(const Work& work) const { return begin_[index(work.pass)][place(work)]; }
  // Whose results it works on; none: the first forward and the last chunk's backward, which follow from their process.
  std::optional<Work> before(const Work& w) const {
    if (w.pass == Pass::forward)
      return w.chunk == 0 ? std::nullopt : std::optional(Work{w.pass, w.chunk - 1, w.micro_batch});
    const bool last = w.chunk + 1 == shape_.all_chunks();
    return last ? std::nullopt : std::optional(Work{w.pass, w.chunk + 1, w.micro_batch});
  }

 private:
  static size_t index(Pass pass) { return pass == Pass::forward ? 0 : 1; }
  size_t place(const Work& w) const { return static_cast<size_t>(w.chunk * shape_.micro_batches + w.micro_batch); }
  int64_t& begin(const Work& work) { return begin_[index(work.pass)][place(work)]; }
  int64_t ready_at(const Work& work) const {
    const std::optional<Work> from = before(work);
    if (!from) return 0;
    const int64_t at = begin(*from);
    return at < 0 ? at : at + 1;
  }

  PipelineShape shape_;
  std::vector<int64_t> begin_[2];
};

// Gives each micro-batch of one chunk the lowest free slot.
class Slots {
 public:
  int64_t take(int64_t micro_batch) {
    const auto free = std::ranges::find(held_, -1);
    if (free != held_.end()) {
      *free = micro_batch;
      return free - held_.begin();
    }
    held_.push_back(micro_batch);
    return std::ssize(held_) - 1;
  }
  int64_t of(int64_t micro_batch) const { return std::ranges::find(held_, micro_batch) - held_.begin(); }
  void release(int64_t micro_batch) { held_[static_cast<size_t>(of(micro_batch))] = -1; }
  int64_t count() const { return std::ssize(held_); }

 private:
  std::vector<int64_t> held_;  // -1: free
};

}  // namespace

PipelinePlan plan_pipeline(const PipelineShape& shape, int64_t process) {
  const Clock clock(shape);
  std::map<int64_t, Tick> ticks;
  for (const Work& work : work_of(shape, process)) {
    ticks[clock.begin(work)].work = work;
    const bool forward = work.pass == Pass::forward;
    const int64_t to = work.chunk + (forward ? 1 : -1);
    if (to < 0 || to == shape.all_chunks()) continue;
    Tick& wanted = ticks[clock.begin({work.pass, to, work.micro_batch})];
    (forward ? wanted.sends_activations : wanted.sends_gradients) = work;
  }
  PipelinePlan plan;
  std::vector<Slots> slots(static_cast<size_t>(shape.chunks));
  const auto slots_of = [&](const Work& w) -> Slots& { return slots[static_cast<size_t>(w.chunk / shape.processes)]; };
  for (auto& [time, tick] : ticks) {
    tick.time = time;
    if (tick.sends_gradients) slots_of(*tick.sends_gradients).release(tick.sends_gradients->micro_batch);
    if (tick.work) {
      const Work& work = *tick.work;
      Slots& own = slots_of(work);
      tick.slot = work.pass == Pass::forward ? own.take(work.micro_batch) : own.of(work.micro_batch);
      if (work.pass == Pass::backward && work.chunk == 0) own.release(work.micro_batch);  // nobody wants its gradient
    }
    plan.ticks.push_back(tick);
  }
  for (const Slots& own : slots) plan.slots.push_back(own.count());
  return plan;
}

}  // namespace tessera::dist
