#include "train/memory_plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "core/machine.h"
#include "train/evaluate.h"
#include "train/guard.h"
#include "train/step.h"

namespace tessera::train {

void LargestBatches::add(std::span<const int64_t> offsets, dist::Mesh* mesh) {
  Counts counts{};
  const auto count = [&](std::span<const int64_t> documents, size_t first) {
    for (size_t n = 0; n + 1 < documents.size(); ++n) {
      const int64_t length = documents[n + 1] - documents[n];
      for (size_t i = 0; i < kPieceTokens.size(); ++i) {
        counts[first + i] += (length + kPieceTokens[i] - 1) / kPieceTokens[i];
      }
    }
  };
  if (mesh == nullptr || mesh->context.alone()) {
    count(offsets, 0);
  } else {
    const model::ContextShard shard(mesh->context, offsets);
    count(shard.offsets(), 0);
    count(shard.key_offsets(), kPieceTokens.size());
    counts[counts.size() - 3] = shard.any_crosses();
    counts[counts.size() - 2] = shard.enters(shard.rank());
    counts[counts.size() - 1] = shard.leaves(shard.rank());
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

// A training step over these micro-batches and these evaluations, dry. `imbalance`: of ModelOptions.
static MemoryPlan dry_run(const model::Model& trained, const RunConfig& config, double imbalance,
                          const Routers& routers, const LargestBatches& training, const LargestBatches& evaluation) {
  const dist::DryMesh mesh(trained.mesh());
  model::ModelOptions options = trained.options();
  options.mesh = mesh.get();
  options.expert_imbalance = imbalance;
  const model::Model model(trained.config(), options);
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger, config.train.product, config.device};
  Stepper stepper(ctx, model, config);
  stepper.set_routers(routers);
  const std::map<std::string, Arena::Use> state = arena.uses();
  std::vector<MicroBatch> batches;
  for (int64_t i = 0; i < training.count(); ++i) batches.push_back({.offsets = training.offsets(i)});
  stepper.accumulate(ctx, batches, 1);
  if (training.count() > 0) stepper.finish(ctx, 0, 0);
  for (int64_t i = 0; i < evaluation.count(); ++i) {
    evaluate_dry(ctx, model, stepper.weights(), evaluation.offsets(i));
  }
  MemoryPlan plan{.static_bytes = stepper.static_bytes(),
                  .gradient_bytes = state.at("gradients").now,
                  .planned_peak = arena.peak()};
  std::set<std::string> ops;
  for (const auto& [key, entry] : ledger.entries()) ops.insert(key.first);
  for (const auto& [what, use] : arena.uses()) {
    using Kind = MemoryUse::Kind;
    const Kind kind = state.contains(what) ? Kind::state : ops.contains(what) ? Kind::workspace : Kind::activations;
    plan.uses.push_back({what, kind, use.at_peak, use.most});
  }
  std::ranges::stable_sort(plan.uses, std::greater<>(), &MemoryUse::most_bytes);
  return plan;
}

MemoryPlan plan_memory(const model::Model& model, const RunConfig& config, const Routers& routers,
                       const LargestBatches& training, const LargestBatches& evaluation) {
  MemoryPlan plan = dry_run(model, config, config.mem.imbalance, routers, training, evaluation);
  // From the run's own options: rungs that were climbed before are among them.
  const Routers climbed =
      config.guard.on ? Routers(routers.size(), with_every_rung({.balance = config.balance})) : routers;
  if (config.device == Device::cuda) {
    plan.capacity = dry_run(model, config, config.mem.imbalance, climbed, training, evaluation).planned_peak;
    return plan;
  }
  LargestBatches worst;  // costs address space, not memory
  worst.add(worst_packing(config.train.micro_tokens));
  plan.capacity = dry_run(model, config, 0, climbed, worst, worst).planned_peak;
  if (config.parallel.context > 1) {  // documents that cross take what those do not, and a batch may have both
    LargestBatches crossing;
    const std::array<int64_t, 2> one_document{0, config.train.micro_tokens};
    crossing.add(one_document);
    plan.capacity += dry_run(model, config, 0, climbed, crossing, crossing).planned_peak;
  }
  return plan;
}

bool MemoryPlan::fits(int64_t usable) const {
  return double(static_bytes - gradient_bytes) <= kMostState * double(usable) &&
         double(planned_peak) <= kMostPeak * double(usable);
}

int64_t usable_bytes(Device device) {
  return device == Device::cuda ? gpu::free_bytes() : inspect_machine().usable_memory_bytes();
}

}  // namespace tessera::train
