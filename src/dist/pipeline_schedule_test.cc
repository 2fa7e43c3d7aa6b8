#include "dist/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace tessera::dist {
namespace {

std::vector<PipelineShape> shapes() {
  std::vector<PipelineShape> all;
  for (int64_t p : {2, 3, 4, 5, 8}) {
    for (int64_t m : {1, 2, 3, 4, 7, 8, 16, 33}) all.push_back({p, 1, m});
    for (int64_t v : {2, 3, 4}) {
      for (int64_t groups : {1, 2, 3, 5}) all.push_back({p, v, groups * p});
    }
  }
  return all;
}

std::string name(const PipelineShape& s) {
  return fmt::format("{} processes, {} chunks, {} micro-batches", s.processes, s.chunks, s.micro_batches);
}

TEST(PipelineSchedule, IsOneForwardOneBackward) {
  const auto F = [](int64_t m) { return Work{Pass::forward, 1, m}; };
  const auto B = [](int64_t m) { return Work{Pass::backward, 1, m}; };
  EXPECT_EQ(work_of({3, 1, 4}, 1), (std::vector<Work>{F(0), F(1), B(0), F(2), B(1), F(3), B(2), B(3)}));
}

TEST(PipelineSchedule, EveryMicroBatchPassesEveryChunkOnceInBothDirections) {
  for (const PipelineShape& shape : shapes()) {
    SCOPED_TRACE(name(shape));
    for (int64_t p = 0; p < shape.processes; ++p) {
      std::set<std::tuple<int64_t, int64_t>> forward, backward;
      for (const Work& w : work_of(shape, p)) {
        EXPECT_EQ(shape.process_of(w.chunk), p);
        EXPECT_TRUE(w.pass == Pass::forward || forward.contains({w.chunk, w.micro_batch}));
        EXPECT_TRUE((w.pass == Pass::forward ? forward : backward).insert({w.chunk, w.micro_batch}).second);
      }
      EXPECT_EQ(std::ssize(forward), shape.chunks * shape.micro_batches);
      EXPECT_EQ(forward, backward);
    }
  }
}

// Every chunk adds the micro-batches to its gradients in their order, as one process does.
TEST(PipelineSchedule, KeepsTheOrderOfMicroBatches) {
  for (const PipelineShape& shape : shapes()) {
    for (int64_t p = 0; p < shape.processes; ++p) {
      std::map<std::pair<Pass, int64_t>, int64_t> next;
      for (const Work& w : work_of(shape, p)) EXPECT_EQ((next[{w.pass, w.chunk}]++), w.micro_batch) << name(shape);
    }
  }
}

// All processes by their plans, where a message keeps both sides until the other one is there.
class Rendezvous {
 public:
  explicit Rendezvous(const PipelineShape& shape) : shape_(shape) {
    for (int64_t p = 0; p < shape.processes; ++p) queues_.push_back(events_of(p));
    at_.assign(queues_.size(), 0);
  }

  bool ends() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t p = 0; p < queues_.size(); ++p) {
        while (at_[p] < queues_[p].size() && can_go(p)) {
          post(p);
          moved = true;
        }
      }
    }
    for (size_t p = 0; p < queues_.size(); ++p) {
      if (at_[p] != queues_[p].size()) return false;
    }
    return true;
  }

 private:
  using Name = std::tuple<Pass, int64_t, int64_t>;
  // Messages that go together, or work.
  struct Event {
    std::vector<Name> sends, receives;
    std::optional<Work> work;
  };
  static Name of(const Work& w) { return {w.pass, w.chunk, w.micro_batch}; }

  std::vector<Event> events_of(int64_t p) const {
    std::vector<Event> events;
    for (const Tick& tick : plan_pipeline(shape_, p).ticks) {
      Event gradients, activations;
      if (tick.sends_gradients) gradients.sends.push_back(of(*tick.sends_gradients));
      if (tick.sends_activations) activations.sends.push_back(of(*tick.sends_activations));
      if (tick.work) {
        const auto [pass, chunk, m] = of(*tick.work);
        if (pass == Pass::forward && chunk > 0) activations.receives.push_back({pass, chunk - 1, m});
        if (pass == Pass::backward && chunk + 1 < shape_.all_chunks())
          gradients.receives.push_back({pass, chunk + 1, m});
      }
      for (const Event& e : {gradients, activations}) {
        if (!e.sends.empty() || !e.receives.empty()) events.push_back(e);
      }
      if (tick.work) events.push_back({{}, {}, tick.work});
    }
    return events;
  }

  // A group is over when the other side of each of its messages has begun the group that it is in.
  bool can_go(size_t p) {
    const Event& e = queues_[p][at_[p]];
    for (const Name& n : e.sends) {
      EXPECT_TRUE(done_.contains(n)) << "sent before it is made";
      sent_.insert(n);
    }
    for (const Name& n : e.receives) wanted_.insert(n);
    return std::ranges::all_of(e.sends, [&](const Name& n) { return wanted_.contains(n); }) &&
           std::ranges::all_of(e.receives, [&](const Name& n) { return sent_.contains(n); });
  }
  void post(size_t p) {
    const Event& e = queues_[p][at_[p]++];
    for (const Name& n : e.receives) received_.insert(n);
    if (!e.work) return;
    const auto [pass, chunk, m] = of(*e.work);
    const int64_t from = chunk + (pass == Pass::forward ? -1 : 1);
    const bool first = from < 0 || from == shape_.all_chunks();
    EXPECT_TRUE(first || received_.contains({pass, from, m})) << "work without its input";
    EXPECT_TRUE(pass == Pass::forward || done_.contains({Pass::forward, chunk, m}));
    done_.insert(of(*e.work));
  }

  PipelineShape shape_;
  std::vector<std::vector<Event>> queues_;
  std::vector<size_t> at_;
  std::set<Name> sent_, wanted_, received_, done_;
};

TEST(PipelineSchedule, EndsWhereMessagesWaitForBothSides) {
  for (const PipelineShape& shape : shapes()) EXPECT_TRUE(Rendezvous(shape).ends()) << name(shape);
}

// A slot is one micro-batch's from its forward pass until its gradient is sent.
TEST(PipelineSchedule, HoldsNoMoreThanItMust) {
  for (const PipelineShape& shape : shapes()) {
    SCOPED_TRACE(name(shape));
    for (int64_t p = 0; p < shape.processes; ++p) {
      const PipelinePlan plan = plan_pipeline(shape, p);
      std::set<std::pair<int64_t, int64_t>> held;  // chunk, slot
      std::map<std::pair<int64_t, int64_t>, int64_t> slot_of;
      int64_t most = 0;
      const auto release = [&](const Work& w) { held.erase({w.chunk, slot_of.at({w.chunk, w.micro_batch})}); };
      for (const Tick& tick : plan.ticks) {
        if (tick.sends_gradients) release(*tick.sends_gradients);
        if (!tick.work) continue;
        const Work& w = *tick.work;
        EXPECT_LT(tick.slot, plan.slots[static_cast<size_t>(w.chunk / shape.processes)]);
        if (w.pass == Pass::forward) {
          EXPECT_TRUE(held.insert({w.chunk, tick.slot}).second) << "a slot of two micro-batches";
          slot_of[{w.chunk, w.micro_batch}] = tick.slot;
        } else {
          EXPECT_EQ(tick.slot, slot_of.at({w.chunk, w.micro_batch}));
        }
        most = std::max(most, std::ssize(held));
        if (w.pass == Pass::backward && w.chunk == 0) release(w);
      }
      EXPECT_TRUE(held.empty());
      const int64_t behind = shape.processes - p, all = shape.chunks * shape.micro_batches;
      if (shape.chunks == 1) {
        EXPECT_EQ(most, std::min(behind, all));
        EXPECT_EQ(plan.slots[0], most);
      } else {  // what runs ahead, the one at work, and one whose gradient nobody wants yet
        EXPECT_LE(most, std::min(2 * behind + (shape.chunks - 1) * shape.processes, all));
      }
    }
  }
}

// The time that the formula says, where one chunk's pass is one tick.
TEST(PipelineSchedule, TakesTheTimeOfItsBubble) {
  for (const PipelineShape& shape : shapes()) {
    int64_t end = 0;
    for (int64_t p = 0; p < shape.processes; ++p) {
      end = std::max(end, plan_pipeline(shape, p).ticks.back().time + 1);
    }
    const double work = double(2 * shape.chunks * shape.micro_batches);
    EXPECT_NEAR(double(end), work / (1 - shape.idle_share()), 1e-6) << name(shape);
  }
}

}  // namespace
}  // namespace tessera::dist
