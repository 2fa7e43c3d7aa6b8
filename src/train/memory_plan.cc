#include "train/memory_plan.h"

#include <algorithm>

#include "core/machine.h"
#include "train/evaluate.h"
#include "train/guard.h"
#include "train/step.h"

namespace tessera::train {

void LargestBatches::add(std::span<const int64_t> offsets) {
  Counts counts{};
  for (size_t n = 0; n + 1 < offsets.size(); ++n) {
    const int64_t length = offsets[n + 1] - offsets[n];
    for (size_t i = 0; i < counts.size(); ++i) counts[i] += (length + kPieceTokens[i] - 1) / kPieceTokens[i];
  }
  const auto covers = [](const Counts& large, const Counts& small) {
    return std::ranges::equal(large, small, std::greater_equal<>());
  };
  const auto larger = std::ranges::find_if(kept_, [&](const Kept& k) { return covers(k.counts, counts); });
  if (larger != kept_.end()) {
    std::swap(kept_.front(), *larger);  // it will drop the next ones, too
    return;
  }
  std::erase_if(kept_, [&](const Kept& k) { return covers(counts, k.counts); });
  kept_.push_back({counts, {offsets.begin(), offsets.end()}});
}

using Routers = std::vector<model::RouterOptions>;

// A training step over these micro-batches, dry; returns the peak of the arena.
static int64_t step_peak(const model::Model& trained, const RunConfig& config, const Routers& routers,
                         const LargestBatches& batches, int64_t* static_bytes) {
  Arena arena = Arena::dry();
  Context ctx{Device::dry, arena, nullptr, config.train.product, config.device};
  const dist::DryMesh mesh(trained.mesh());
  model::ModelOptions options = trained.options();
  options.mesh = mesh.get();
  const model::Model model(trained.config(), options);
  Stepper stepper(ctx, model, config);
  stepper.set_routers(routers);
  *static_bytes = stepper.static_bytes();
  for (int64_t i = 0; i < batches.count(); ++i) {
    const std::vector<int64_t>& offsets = batches.offsets(i);
    stepper.accumulate(ctx, stepper.place(ctx, nullptr, nullptr, offsets), offsets.back());
  }
  if (batches.count() > 0) stepper.finish(ctx, 0, 0);
  return arena.peak();
}

MemoryPlan plan_memory(const model::Model& trained, const RunConfig& config, const Routers& routers,
                       const LargestBatches& training, const LargestBatches& evaluation) {
  MemoryPlan plan;
  const auto peak = [&](double imbalance, const Routers& with, const LargestBatches& steps,
                        const LargestBatches& evaluations) {
    model::ModelOptions options = trained.options();
    options.expert_imbalance = imbalance;
    const model::Model model(trained.config(), options);
    const int64_t step = step_peak(model, config, with, steps, &plan.static_bytes);
    int64_t largest = 0;
    for (int64_t i = 0; i < evaluations.count(); ++i) {
      largest = std::max(largest, evaluation_bytes(model, evaluations.offsets(i), config.train.product, config.device));
    }
    return std::max(step, plan.static_bytes + largest);
  };
  plan.planned_peak = peak(config.mem.imbalance, routers, training, evaluation);
  // From the run's own options: rungs that were climbed before are among them.
  const Routers climbed =
      config.guard.on ? Routers(routers.size(), with_every_rung({.balance = config.balance})) : routers;
  if (config.device == Device::cuda) {
    plan.capacity = peak(config.mem.imbalance, climbed, training, evaluation);
    return plan;
  }
  LargestBatches worst;  // costs address space, not memory
  worst.add(worst_packing(config.train.micro_tokens));
  plan.capacity = peak(0, climbed, worst, worst);
  return plan;
}

void require_memory(const MemoryPlan& plan, const RunConfig& config) {
  const bool cuda = config.device == Device::cuda;
  const int64_t available = cuda ? gpu::free_bytes() : inspect_machine().usable_memory_bytes();
  const double limit = 0.95 * double(available);
  if (double(plan.planned_peak) <= limit) return;
  const double gib = double(int64_t{1} << 30);
  fail_user(
      "the run needs {:.1f} GiB ({:.1f} of them parameters, gradients and optimizer state) and {:.1f} GiB are "
      "available; set train.micro_tokens = {}, or train.recompute_all = true, or choose a smaller model",
      double(plan.planned_peak) / gib, double(plan.static_bytes) / gib, double(available) / gib,
      std::max(config.data.context, config.train.micro_tokens / 2 / config.data.context * config.data.context));
}

}  // namespace tessera::train
