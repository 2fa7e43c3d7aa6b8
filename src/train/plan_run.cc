#include "train/plan_run.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "core/parallel.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

constexpr int64_t kBlockTokens = 16384;  // enough rows for the experts' products to run at their full rate
constexpr size_t kChanges = 3;           // that are worth reading

std::vector<int64_t> equal_documents(int64_t tokens, int64_t length) {
  std::vector<int64_t> offsets{0};
  while (offsets.back() < tokens) offsets.push_back(std::min(tokens, offsets.back() + length));
  return offsets;
}

MemoryPlan assumed_plan(const RunConfig& config) {
  if (config.threads > 0) set_thread_count(static_cast<int>(config.threads));
  const model::ModelConfig shape = model::load_model_config(config.model_file);
  const model::Model model(shape, config.model_options(shape));
  LargestBatches training, evaluation;
  training.add(equal_documents(config.train.micro_tokens, config.data.context));
  evaluation.add(equal_documents(std::min(config.train.micro_tokens, config.eval.tokens), config.data.context));
  return plan_memory(model, config, Guard(model, config.guard_options()).routers(), training, evaluation);
}

std::vector<int64_t> smaller_micro_batches(const RunConfig& config) {
  std::vector<int64_t> sizes;
  const int64_t sequences = config.sequences_per_micro_batch();
  for (int64_t n = sequences - 1; n > 0; --n) {
    if (sequences % n == 0) sizes.push_back(n * config.data.context);
  }
  return sizes;
}

}  // namespace

bool has_store(const RunConfig& config) {
  return std::filesystem::exists(std::filesystem::path(config.data.store) / "train" / "meta.json");
}

RunPlan plan_run(const RunConfig& config) {
  if (has_store(config)) return {Trainer(config).plan(), false};
  return {assumed_plan(config), true};
}

std::vector<Change> cheapest_changes(const RunConfig& config, int64_t usable) {
  std::vector<Change> found;
  const auto attempt = [&](const std::string& settings, const std::function<void(RunConfig&)>& change) {
    RunConfig changed = config;
    change(changed);
    const MemoryPlan memory = plan_run(changed).memory;
    const bool fits = memory.fits(usable);
    if (fits) found.push_back({settings, memory});
    return fits;
  };
  const std::vector<int64_t> sizes = smaller_micro_batches(config);
  for (int64_t size : sizes) {  // no more work, less at a time
    if (attempt(fmt::format("train.micro_tokens = {}", size), [&](RunConfig& c) { c.train.micro_tokens = size; }))
      break;
  }
  const bool all = config.train.recompute_all, blocks = config.train.ffn_block_tokens > 0;
  const std::string block_key = fmt::format("train.ffn_block_tokens = {}", kBlockTokens);
  const std::string all_key = "train.recompute_all = true";
  if (!all && !config.train.recompute_selective) {
    attempt("train.recompute_selective = true", [](RunConfig& c) { c.train.recompute_selective = true; });
  }
  if (!blocks) attempt(block_key, [](RunConfig& c) { c.train.ffn_block_tokens = kBlockTokens; });
  if (!all) attempt(all_key, [](RunConfig& c) { c.train.recompute_all = true; });
  const auto least = [](RunConfig& c) {
    c.train.recompute_all = true;
    if (c.train.ffn_block_tokens == 0) c.train.ffn_block_tokens = kBlockTokens;
  };
  const std::string least_keys = all_key + (blocks ? "" : ", " + block_key);
  if (!all && !blocks) attempt(least_keys, least);
  for (size_t i = 0; i < sizes.size() && found.empty(); ++i) {
    attempt(fmt::format("train.micro_tokens = {}, {}", sizes[i], least_keys), [&](RunConfig& c) {
      least(c);
      c.train.micro_tokens = sizes[i];
    });
  }
  // The least that the sequence takes is too much: shorter ones.
  for (int64_t context = config.data.context / 2; context >= 1024 && found.empty(); context /= 2) {
    attempt(fmt::format("data.context = {0}, train.micro_tokens = {0}, {1}", context, least_keys), [&](RunConfig& c) {
      least(c);
      c.data.context = c.train.micro_tokens = context;
    });
  }
  if (found.size() > kChanges) found.resize(kChanges);
  return found;
}

void require_memory(const MemoryPlan& plan, const RunConfig& config) {
  const int64_t usable = usable_bytes(config.device);
  if (plan.fits(usable)) return;
  const auto gib = [](int64_t bytes) { return double(bytes) / double(int64_t{1} << 30); };
  std::string advice;
  for (const Change& change : cheapest_changes(config, usable)) {
    advice += fmt::format("{}set {} ({:.1f} GiB)", advice.empty() ? "" : ", or ", change.settings,
                          gib(change.memory.planned_peak));
  }
  fail_user(
      "the run needs {:.1f} GiB ({:.1f} of them parameters, gradients and optimizer state) and {:.1f} GiB are "
      "available, of which a run may plan 95 %, 70 % without gradients and activations; {}",
      gib(plan.planned_peak), gib(plan.static_bytes), gib(usable),
      advice.empty() ? "no setting is enough, choose a smaller model" : advice);
}

}  // namespace tessera::train
