#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "optim/parts.h"
#include "optim/test_slots.h"

namespace tessera::optim {
namespace {

// A small model's worth: matrices on one thread and on all, experts, an embedding, a vector, and an empty rank.
std::vector<Slot> mixed_slots(Bench& bench, double gradient_scale = 1) {
  return {bench.slot("attention", {4 * 48, 100}, Rule::muon, 4, 0.1, 1, gradient_scale),
          bench.slot("experts", {5, 40, 24}, Rule::muon, 5, 0.1, 2, gradient_scale),
          bench.slot("large", {520, 510}, Rule::muon, 1, 0.1, 3, gradient_scale),
          bench.slot("none", {0, 40, 24}, Rule::muon, 1, 0.1, 4, gradient_scale),
          bench.slot("embedding", {1000, 33}, Rule::adamw, 1, 0.1, 5, gradient_scale),
          bench.slot("router", {6, 50}, Rule::adamw, 6, 0.1, 6, gradient_scale),
          bench.slot("gain", {50}, Rule::adamw, 1, 0, 7, gradient_scale)};
}

Values everything(const Optimizer& optimizer) {  // values, then state
  Values all;
  const auto append = [&](const View& view) {
    for (double v : read(view)) all.push_back(v);
  };
  for (const Slot& slot : optimizer.slots()) append(slot.value);
  for (const auto& tensor : optimizer.state()) append(tensor.view);
  return all;
}

Values trained(int threads, int64_t steps) {
  const int before = thread_count();
  set_thread_count(threads);
  Bench bench;
  std::vector<Slot> slots = mixed_slots(bench);
  // Few results and a long sum: a threaded GEMM may cut the sum by thread.
  slots.push_back(bench.slot("wide", {40, 6600}, Rule::muon, 1, 0.1, 8));
  Optimizer optimizer(slots, {});
  optimizer.allocate_state(bench.context);
  double norm = 0;
  for (int64_t step = 0; step < steps; ++step) norm = optimizer.step(bench.context, 0.01, step).gradient_norm;
  set_thread_count(before);
  Values all = everything(optimizer);
  all.push_back(norm);
  return all;
}

TEST(Optimizer, SameBitsForAnyThreadCount) {
  const Values one = trained(1, 2);
  for (int threads : {2, 3}) EXPECT_EQ(trained(threads, 2), one) << threads;
}

TEST(Optimizer, NormIsThatOfAllGradients) {
  Bench bench;
  const std::vector<Slot> slots = mixed_slots(bench);
  double square = 0;
  for (const Slot& s : slots) {
    for (double g : read(s.gradient)) square += g * g;
  }
  Optimizer optimizer(slots, {});
  optimizer.allocate_state(bench.context);
  const StepReport report = optimizer.step(bench.context, 0.01, 0);
  EXPECT_NEAR(report.gradient_norm, std::sqrt(square), 1e-12 * std::sqrt(square));
  EXPECT_EQ(report.clip_scale, 1 / report.gradient_norm);
  EXPECT_TRUE(report.finite);
}

TEST(Optimizer, ClippingEqualsScaledGradients) {
  Bench clipped(DType::f64), scaled(DType::f64);
  Optimizer a({clipped.slot("m", {20, 30}, Rule::muon, 2, 0.1, 1), clipped.slot("v", {40}, Rule::adamw, 1, 0, 2)},
              {.clip_norm = 0.5});
  Optimizer b({scaled.slot("m", {20, 30}, Rule::muon, 2, 0.1, 1), scaled.slot("v", {40}, Rule::adamw, 1, 0, 2)},
              {.clip_norm = 0});
  a.allocate_state(clipped.context);
  b.allocate_state(scaled.context);
  std::vector<Values> gradients;
  for (const Slot& s : a.slots()) gradients.push_back(read(s.gradient));
  const double scale = a.step(clipped.context, 0.01, 0).clip_scale;
  EXPECT_LT(scale, 0.1);
  for (const Slot& s : b.slots()) {
    Values g = read(s.gradient);
    for (double& v : g) v *= scale;
    scaled.fill(s.gradient, g);
  }
  const StepReport report = b.step(scaled.context, 0.01, 0);
  EXPECT_EQ(report.clip_scale, 1);
  EXPECT_NEAR(report.gradient_norm, 0.5, 1e-14);
  EXPECT_LT(relative_error(everything(a), everything(b)), 1e-14);
  for (size_t i = 0; i < gradients.size(); ++i) EXPECT_EQ(read(a.slots()[i].gradient), gradients[i]);
}

TEST(Optimizer, GradientsBelowTheLimitAreNotScaled) {
  Bench bench;
  Optimizer optimizer({bench.slot("v", {4}, Rule::adamw, 1, 0, 1, 1e-3)}, {});
  optimizer.allocate_state(bench.context);
  EXPECT_EQ(optimizer.step(bench.context, 0.01, 0).clip_scale, 1);
}

TEST(Optimizer, NonFiniteGradientChangesNothing) {
  Bench bench;
  Optimizer optimizer(mixed_slots(bench), {});
  optimizer.allocate_state(bench.context);
  optimizer.step(bench.context, 0.01, 0);
  const Values before = everything(optimizer);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity()}) {
    for (size_t slot : {size_t{0}, size_t{2}, size_t{4}, size_t{6}}) {
      const View& gradient = optimizer.slots()[slot].gradient;
      float& last = gradient.as<float>()[gradient.elements() - 1];
      const float good = std::exchange(last, bad);
      EXPECT_FALSE(optimizer.step(bench.context, 0.01, 1).finite);
      EXPECT_EQ(everything(optimizer), before);
      last = good;
    }
  }
  EXPECT_TRUE(optimizer.step(bench.context, 0.01, 1).finite);
  EXPECT_NE(everything(optimizer), before);
}

TEST(Optimizer, LargestFiniteGradientIsFinite) {
  Bench bench;
  const Slot slot = bench.slot("w", {8, 16}, Rule::muon, 1, 0, 1);
  bench.fill(slot.gradient, Values(128, std::numeric_limits<float>::max()));
  Optimizer optimizer({slot}, {});
  optimizer.allocate_state(bench.context);
  EXPECT_TRUE(optimizer.step(bench.context, 0.01, 0).finite);
  for (double v : everything(optimizer)) EXPECT_TRUE(std::isfinite(v));
}

TEST(Optimizer, StateIsNamedAndStartsAtZero) {
  Bench bench;
  Optimizer optimizer(mixed_slots(bench), {});
  EXPECT_THROW(optimizer.state(), Error);
  EXPECT_THROW(optimizer.step(bench.context, 0.01, 0), Error);
  optimizer.allocate_state(bench.context);
  std::vector<std::string> names;
  for (const auto& tensor : optimizer.state()) {
    names.push_back(tensor.name);
    for (double v : read(tensor.view)) EXPECT_EQ(v, 0);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"muon.momentum.attention", "muon.momentum.experts", "muon.momentum.large",
                                             "muon.momentum.none", "adam.m.embedding", "adam.v.embedding",
                                             "adam.m.router", "adam.v.router", "adam.m.gain", "adam.v.gain"}));
}

TEST(Optimizer, ResetBlockClearsThatBlockAlone) {
  Bench bench;
  Optimizer optimizer(mixed_slots(bench), {});
  optimizer.allocate_state(bench.context);
  optimizer.step(bench.context, 0.01, 0);
  optimizer.reset_block("experts", 3);
  optimizer.reset_block("router", 5);
  for (const auto& tensor : optimizer.state()) {
    const bool experts = tensor.name == "muon.momentum.experts";
    const bool router = tensor.name == "adam.m.router" || tensor.name == "adam.v.router";
    const int64_t block = experts ? 40 * 24 : 50, cleared = experts ? 3 : 5;
    const Values values = read(tensor.view);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool zero = (experts || router) && int64_t(i) / block == cleared;
      ASSERT_EQ(values[i] == 0, zero) << tensor.name << " " << i;
    }
  }
}

// Parts of slots, each at its owner, make the same step as the whole slots in one optimizer.
TEST(Optimizer, PartsMakeTheStepOfTheWhole) {
  Bench whole;
  Optimizer together(mixed_slots(whole), {});
  together.allocate_state(whole.context);
  const StepReport report = together.step(whole.context, 0.01, 0);
  together.reset_block("experts", 3);
  for (const int owners : {2, 3, 7}) {
    Bench bench;
    const std::vector<Slot> slots = mixed_slots(bench);
    std::vector<Slot> of_owner[7];
    for (const Part& part : share_out(slots, owners)) of_owner[part.owner].push_back(part_of(slots[part.slot], part));
    int64_t elements = 0, most = 0;
    for (const std::vector<Slot>& own : of_owner) {
      int64_t n = 0;
      for (const Slot& slot : own) n += slot.value.elements();
      elements += n;
      most = std::max(most, n);
      Optimizer optimizer(own, {});
      optimizer.allocate_state(bench.context);
      optimizer.step(bench.context, 0.01, 0, report.gradient_norm);
      optimizer.reset_block("experts", 3);
      for (const auto& tensor : optimizer.state()) {
        const auto of_whole = together.state();
        const auto same = std::ranges::find(of_whole, tensor.name, &Optimizer::StateTensor::name);
        EXPECT_EQ(read(tensor.view), read(same->view.row_range(tensor.first_row, tensor.view.rows()))) << tensor.name;
      }
    }
    const std::vector<Slot>& wanted = together.slots();
    int64_t all = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      EXPECT_EQ(read(slots[i].value), read(wanted[i].value)) << slots[i].name;
      all += slots[i].value.elements();
    }
    EXPECT_EQ(elements, all);
    EXPECT_LT(most, all) << owners;
  }
}

// Block 1 has no gradient, block 2 a single one in its last place: only block 1 may be spared, and only where asked.
TEST(Optimizer, IdleBlocksAreSparedFromDecayWhereAsked) {
  constexpr int64_t kBlock = 40 * 24;
  const auto trained_experts = [](bool decay_idle, int threads) {
    const int before = thread_count();
    set_thread_count(threads);
    Bench bench;
    Slot experts = bench.slot("experts", {3, 40, 24}, Rule::muon, 3, 0.1, 1);
    experts.decay_idle = decay_idle;
    Values gradient = read(experts.gradient);
    std::fill(gradient.begin() + kBlock, gradient.end() - 1, 0.0);
    bench.fill(experts.gradient, gradient);
    Optimizer optimizer({experts}, {});
    optimizer.allocate_state(bench.context);
    optimizer.step(bench.context, 0.01, 0);
    set_thread_count(before);
    return std::pair(random_values(1, 3 * kBlock), read(experts.value));
  };
  const auto [start, spared] = trained_experts(false, 1);
  const auto [same_start, decayed] = trained_experts(true, 1);
  for (size_t i = 0; i < spared.size(); ++i) {
    if (int64_t(i) / kBlock == 1) {
      EXPECT_EQ(spared[i], double(float(start[i])));
      EXPECT_NEAR(decayed[i], 0.999 * start[i], 1e-6);
    } else {
      EXPECT_EQ(spared[i], decayed[i]);
    }
  }
  EXPECT_EQ(trained_experts(false, 3).second, spared);
}

TEST(Optimizer, DryRunTakesTheSameMemoryAndChargesTheSame) {
  Bench bench;
  Arena dry_arena = Arena::dry();
  Ledger dry_ledger;
  Context dry{Device::dry, dry_arena, &dry_ledger};
  std::vector<Slot> dry_slots = mixed_slots(bench);
  Optimizer real(dry_slots, {});
  for (Slot& s : dry_slots) {
    s.value = View(nullptr, s.value.dtype(), s.value.shape());
    s.gradient = View(nullptr, s.gradient.dtype(), s.gradient.shape());
  }
  Optimizer planned(dry_slots, {});
  const int64_t before = bench.arena.used();
  real.allocate_state(bench.context);
  planned.allocate_state(dry);
  const int64_t state = dry_arena.used();
  EXPECT_EQ(bench.arena.used() - before, state);
  bench.arena.reset_peak();
  dry_arena.reset_peak();
  real.step(bench.context, 0.01, 0);
  const StepReport report = planned.step(dry, 0.01, 0);
  EXPECT_TRUE(report.finite);
  EXPECT_EQ(bench.arena.used() - before, state);
  EXPECT_EQ(dry_arena.used(), state);
  EXPECT_EQ(bench.arena.peak() - before, dry_arena.peak());
  const Costs costs = Optimizer::costs(dry_slots, {});
  EXPECT_EQ(dry_arena.peak() - state, costs.workspace_bytes);
  for (const Ledger* ledger : {&bench.ledger, &dry_ledger}) {
    const Costs total = ledger->total();
    EXPECT_EQ(total.gemm_flops, costs.gemm_flops);
    EXPECT_EQ(total.vector_flops, costs.vector_flops);
    EXPECT_EQ(total.bytes_moved, costs.bytes_moved);
    EXPECT_EQ(ledger->entries().count({"muon", Pass::backward}), 1u);
    EXPECT_EQ(ledger->entries().count({"adamw", Pass::backward}), 1u);
  }
}

TEST(Optimizer, ForAGpuADryRunTakesTheStatedMemory) {
  Arena arena = Arena::dry();
  Ledger ledger;
  Context dry{Device::dry, arena, &ledger, Product::bf16, Device::cuda};
  Bench bench;
  std::vector<Slot> slots = mixed_slots(bench), with_copies = slots;
  for (auto* all : {&slots, &with_copies}) {
    for (Slot& s : *all) s.value = s.gradient = View(nullptr, DType::f32, s.value.shape());
  }
  int64_t copied = 0;
  for (Slot& s : with_copies) {
    s.copy = View(nullptr, DType::bf16, s.value.shape());
    copied += s.copy.bytes();
  }
  Optimizer planned(with_copies, {});
  planned.allocate_state(dry);
  const int64_t state = arena.used();
  EXPECT_EQ(planned.step(dry, 0.01, 0).clip_scale, 1);
  const Costs costs = Optimizer::costs(with_copies, {}, Device::cuda);
  EXPECT_EQ(arena.peak() - state, costs.workspace_bytes);
  EXPECT_EQ(ledger.total().bytes_moved, costs.bytes_moved);
  EXPECT_TRUE(ledger.total().gemm_flops == Optimizer::costs(slots, {}).gemm_flops);
  EXPECT_EQ(costs.bytes_moved, Optimizer::costs(slots, {}, Device::cuda).bytes_moved + copied);
}

TEST(Optimizer, CostsFollowTheFormulas) {
  const View value(nullptr, DType::f32, {2 * 3072, 3584});
  const std::vector<Slot> slots{{"w", value, value, Rule::muon, 2, 0.1}};
  const int64_t a = 3072, b = 3584;
  EXPECT_EQ(Optimizer::costs(slots, {}).gemm_flops, 2 * 5 * (4 * a * a * b + 2 * a * a * a));  // 9.66e11 a matrix
}

TEST(Optimizer, NoSlots) {
  Bench bench;
  Optimizer none({}, {});
  none.allocate_state(bench.context);
  EXPECT_EQ(none.step(bench.context, 0.01, 0).gradient_norm, 0);
  EXPECT_TRUE(none.state().empty());
}

TEST(Optimizer, RefusesSlotsThatCannotBe) {
  Bench bench;
  const Slot good = bench.slot("w", {6, 8, 10}, Rule::muon, 6, 0.1, 1);
  EXPECT_NO_THROW(Optimizer({good}, {}));
  for (int64_t blocks : {0, 1, 3, 18, 7}) {  // experts joined into one matrix, or rows split
    Slot bad = good;
    bad.blocks = blocks;
    EXPECT_THROW(Optimizer({bad}, {}), Error) << blocks;
  }
  EXPECT_THROW(Optimizer({bench.slot("vector", {8}, Rule::muon, 1, 0, 2)}, {}), Error);
  EXPECT_THROW(Optimizer({good, good}, {}), Error);
  Slot other = good;
  other.gradient = bench.arena.allocate(DType::f64, {6, 8, 10});
  EXPECT_THROW(Optimizer({other}, {}), Error);
  other = good;
  other.copy = bench.arena.allocate(DType::bf16, {6, 8, 10});
  EXPECT_THROW(Optimizer({other}, {}), Error) << "nothing on a CPU would keep the copy";
  other = good;
  other.gradient = bench.arena.allocate(DType::f32, {6, 8, 11});
  EXPECT_THROW(Optimizer({other}, {}), Error);
  other = bench.slot("adamw", {6, 8}, Rule::adamw, 6, 0.1, 3);
  other.decay_idle = false;
  EXPECT_THROW(Optimizer({other}, {}), Error);
}

TEST(Optimizer, RefusesOptionsOutOfRange) {
  for (const Options& bad :
       {Options{.momentum = 1}, Options{.newton_schulz_steps = 0}, Options{.beta1 = 1}, Options{.beta2 = -0.1},
        Options{.epsilon = 0}, Options{.clip_norm = -1}, Options{.clip_norm = std::nan("")}}) {
    EXPECT_THROW(Optimizer({}, bad), UserError);
  }
}

}  // namespace
}  // namespace tessera::optim
