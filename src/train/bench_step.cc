#include "train/bench_step.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "core/philox.h"
#include "ops/gemm/gemm.h"
#include "train/step.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kHopperDenseBf16 = 989e12;  // FLOP/s, NVIDIA's datasheet of the H100 and H200

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

RunConfig run_config(const StepBenchOptions& o) {
  RunConfig run;
  run.model_file = o.model_file;
  run.data.context = o.context;
  const auto whole = [](int64_t tokens, int64_t unit) { return std::max(unit, tokens / unit * unit); };
  run.train.micro_tokens = whole(o.micro_tokens > 0 ? std::min(o.micro_tokens, o.tokens) : o.tokens, o.context);
  run.train.tokens_per_step = whole(o.tokens, run.train.micro_tokens);
  run.train.product = o.product;
  run.train.recompute_all = o.recompute_all;
  run.train.recompute_selective = o.recompute_selective;
  run.train.ffn_block_tokens = o.ffn_block_tokens;
  run.device = o.device;
  return run;
}

std::vector<int64_t> sequence_offsets(const RunConfig& run) {
  std::vector<int64_t> offsets;
  for (int64_t t = 0; t <= run.train.micro_tokens; t += run.data.context) offsets.push_back(t);
  return offsets;
}

// `ids`: one more than tokens, each the target of the one before; null on dry.
void one_step(Context& ctx, Stepper& stepper, const RunConfig& run, const int32_t* ids, int64_t step) {
  const std::vector<int64_t> offsets = sequence_offsets(run);
  const int64_t micro = run.train.micro_tokens, tokens = run.train.tokens_per_step;
  for (int64_t first = 0; first < tokens; first += micro) {
    const int32_t* from = ids == nullptr ? nullptr : ids + first;
    stepper.accumulate(ctx, stepper.place(ctx, from, from == nullptr ? nullptr : from + 1, offsets), tokens);
  }
  stepper.finish(ctx, 1e-3, step);
}

std::vector<int32_t> random_tokens(int64_t tokens, int64_t vocabulary) {
  const Philox random(1, Purpose::test);
  std::vector<int32_t> ids(static_cast<size_t>(tokens));
  for (size_t t = 0; t < ids.size(); ++t) ids[t] = static_cast<int32_t>(random.bits(t) % uint64_t(vocabulary));
  return ids;
}

void add_profile(const Ledger& ledger, StepBench& b) {
  std::map<std::string, StepBench::Row> rows;
  for (const auto& [key, entry] : ledger.entries()) {
    StepBench::Row& row = rows[key.first];
    row.op = key.first;
    row.seconds += entry.seconds;
    row.gemm_flops += double(entry.costs.gemm_flops);
  }
  double all = 0;
  for (const auto& [op, row] : rows) all += row.seconds;
  for (auto& [op, row] : rows) {
    row.share = row.seconds / all;
    row.gemm_flops = row.seconds > 0 ? row.gemm_flops / row.seconds : 0;
    b.by_op.push_back(row);
  }
  std::ranges::sort(b.by_op, std::greater<>(), &StepBench::Row::seconds);
}

}  // namespace

StepBench bench_step(const StepBenchOptions& o) {
  StepBench b;
  b.gemm_rate = ops::measured_gemm_rate(o.product, o.device);
  const auto begin = Clock::now();
  const RunConfig run = run_config(o);
  model::ModelConfig config = model::load_model_config(o.model_file);
  if (o.kda_only) config.mla_layers.clear();
  const model::Model model(config, run.model_options(config));

  Ledger planned;
  Arena dry = Arena::dry();
  Context dry_ctx{Device::dry, dry, &planned, o.product, o.device};
  Stepper dry_stepper(dry_ctx, model, run);
  one_step(dry_ctx, dry_stepper, run, nullptr, 0);

  const bool cuda = o.device == Device::cuda;
  Arena arena(dry.peak(), cuda ? Memory::gpu : Memory::host);
  Ledger ledger;
  Context ctx{o.device, arena, nullptr, o.product};
  Stepper stepper(ctx, model, run);
  stepper.initialise(1);
  const std::vector<int32_t> ids = random_tokens(run.train.tokens_per_step + 1, config.vocabulary);
  one_step(ctx, stepper, run, ids.data(), 0);
  if (cuda) gpu::wait();
  b.first_step_s = seconds_since(begin);

  std::vector<double> seconds;
  for (int64_t s = 0; s < o.steps; ++s) {
    const auto step_begin = Clock::now();
    one_step(ctx, stepper, run, ids.data(), s + 1);
    if (cuda) gpu::wait();
    seconds.push_back(seconds_since(step_begin));
  }
  std::ranges::nth_element(seconds, seconds.begin() + o.steps / 2);
  b.step_s = seconds[static_cast<size_t>(o.steps / 2)];
  ctx.ledger = &ledger;  // one more step for the profile: on a GPU it waits for every op
  one_step(ctx, stepper, run, ids.data(), o.steps + 1);

  double flops = 0;
  for (const auto& [key, entry] : planned.entries()) {
    if (key.first != "muon" && key.first != "adamw") flops += double(entry.costs.gemm_flops);
  }
  b.model = config.name;
  b.context = run.data.context;
  b.tokens = run.train.tokens_per_step;
  b.micro_tokens = run.train.micro_tokens;
  b.tokens_per_s = double(b.tokens) / b.step_s;
  b.flops_per_token = flops / double(b.tokens);
  b.achieved_flops = flops / b.step_s;
  b.gemm_share = b.achieved_flops / b.gemm_rate;
  b.mfu = cuda ? b.achieved_flops / kHopperDenseBf16 : b.gemm_share;
  b.static_bytes = stepper.static_bytes();
  b.planned_peak_bytes = dry.peak();
  b.peak_bytes = arena.peak();
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  b.process_peak_bytes = usage.ru_maxrss * 1024;
  add_profile(ledger, b);
  return b;
}

}  // namespace tessera::train
