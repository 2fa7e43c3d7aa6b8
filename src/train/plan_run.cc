#include "train/plan_run.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "core/parallel.h"
#include "train/trainer.h"

namespace tessera::train {
namespace {

constexpr int64_t kBlockTokens = 16384;  // enough rows for the experts' products to run at their full rate
constexpr int64_t kAllPlanned = 8;       // processes whose plans take seconds with a large store
constexpr size_t kChanges = 3;           // that are worth reading

std::vector<int64_t> equal_documents(int64_t tokens, int64_t length) {
  std::vector<int64_t> offsets{0};
  while (offsets.back() < tokens) offsets.push_back(std::min(tokens, offsets.back() + length));
  return offsets;
}

MemoryPlan plan_of_sequences(const RunConfig& config, dist::Mesh* mesh) {
  if (config.threads > 0) set_thread_count(static_cast<int>(config.threads));
  const model::ModelConfig shape = model::load_model_config(config.model_file);
  model::ModelOptions options = config.model_options(shape);
  options.mesh = mesh;
  const model::Model model(shape, options);
  LargestBatches training, evaluation;
  training.add(equal_documents(config.train.micro_tokens, config.data.context));
  evaluation.add(equal_documents(std::min(config.train.micro_tokens, config.eval.tokens), config.data.context));
  return plan_memory(model, config, Guard(model, config.guard_options()).routers(), training, evaluation);
}

// Of the processes `stride` apart, from the first to the last.
template <class F>
RunPlan largest_plan(const RunConfig& config, int64_t stride, F&& plan_of) {
  RunPlan largest;
  for (int64_t rank = 0; rank < config.parallel.processes(); rank += std::max<int64_t>(stride, 1)) {
    const dist::DryMesh mesh(config.parallel, static_cast<int>(rank), config.job.ranks_per_node);
    const MemoryPlan memory = plan_of(mesh.get());
    if (memory.planned_peak > largest.memory.planned_peak) largest = {memory, false, rank};
  }
  return largest;
}

bool is_legal(const RunConfig& config) {
  try {
    config.check("");
    return true;
  } catch (const UserError&) {
    return false;
  }
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
  if (!has_store(config)) return assumed_plan(config);
  const int64_t last = config.parallel.processes() - 1;
  return largest_plan(config, last < kAllPlanned ? 1 : last,
                      [&](dist::Mesh* mesh) { return Trainer(config, mesh).plan(); });
}

RunPlan assumed_plan(const RunConfig& config) {
  RunPlan plan = largest_plan(config, config.parallel.processes() - 1,
                              [&](dist::Mesh* mesh) { return plan_of_sequences(config, mesh); });
  plan.assumed = true;
  return plan;
}

int64_t processes_of_machine(const RunConfig& config) {
  const int64_t all = config.parallel.processes(), set = config.job.ranks_per_node;
  return set > 0 ? std::min(set, all) : all;
}

std::vector<Change> cheapest_changes(const RunConfig& config, int64_t usable) {
  std::vector<Change> found;
  const auto attempt = [&](const std::string& settings, const std::function<void(RunConfig&)>& change) {
    RunConfig changed = config;
    change(changed);
    if (!is_legal(changed)) return false;
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
  const bool all = config.train.recompute_all;
  // Neither is needed nor asked for where it would be refused: rows of other processes come for all tokens at once.
  const bool blocks = config.train.ffn_block_tokens > 0 || config.parallel.expert > 1;
  const std::string block_key = fmt::format("train.ffn_block_tokens = {}", kBlockTokens);
  const std::string all_key = "train.recompute_all = true";
  if (!all && !config.train.recompute_selective) {
    attempt("train.recompute_selective = true", [](RunConfig& c) { c.train.recompute_selective = true; });
  }
  if (!blocks) attempt(block_key, [](RunConfig& c) { c.train.ffn_block_tokens = kBlockTokens; });
  if (!all) attempt(all_key, [](RunConfig& c) { c.train.recompute_all = true; });
  const auto least = [blocks](RunConfig& c) {
    c.train.recompute_all = true;
    if (!blocks) c.train.ffn_block_tokens = kBlockTokens;
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

void require_memory(const MemoryPlan& plan, const RunConfig& config, int64_t sharing) {
  const int64_t usable = usable_bytes(config.device) / (config.device == Device::cpu ? sharing : 1);
  if (plan.fits(usable)) return;
  const auto gib = [](int64_t bytes) { return double(bytes) / double(int64_t{1} << 30); };
  std::string advice;
  for (const Change& change : cheapest_changes(config, usable)) {
    advice += fmt::format("{}set {} ({:.1f} GiB)", advice.empty() ? "" : ", or ", change.settings,
                          gib(change.memory.planned_peak));
  }
  fail_user(
      "{} needs {:.1f} GiB ({:.1f} of them parameters, gradients and optimizer state) and {:.1f} GiB are "
      "available, of which a run may plan 95 %, 70 % without gradients and activations; {}",
      config.parallel.processes() > 1 ? "a process of the run" : "the run", gib(plan.planned_peak),
      gib(plan.static_bytes), gib(usable), advice.empty() ? "no setting is enough, choose a smaller model" : advice);
}

}  // namespace tessera::train
