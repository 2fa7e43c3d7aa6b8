#include "train/plan_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "train/step.h"

namespace tessera::train {
namespace {

// Of a micro-batch in one process of the context axis: a chunk of KDA. With less, exchanges are all that is left.
constexpr int64_t kLeastTokens = 64;

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= n; ++d) {
    if (n % d == 0) found.push_back(d);
  }
  return found;
}

// As far as the run's micro-batches allow, of the largest size that `data` processes can share evenly.
int64_t micro_tokens_for(const RunConfig& run, int64_t data) {
  const int64_t step = run.train.tokens_per_step;
  for (int64_t parts = data; step / parts >= run.data.context; parts += data) {
    const int64_t size = step / parts;
    if (step % parts == 0 && size % run.data.context == 0 && size <= run.train.micro_tokens) return size;
  }
  return run.train.micro_tokens;
}

// Throws UserError where the layout is not legal.
RunConfig run_on(const RunConfig& run, const dist::Layout& layout) {
  RunConfig config = run;
  config.parallel = layout;
  config.train.micro_tokens = micro_tokens_for(run, layout.data);
  config.check(layout.to_string());
  const int64_t part = config.train.micro_tokens / layout.context;
  if (layout.context > 1 && part < kLeastTokens) {
    fail_user("{}: parts of {} tokens of a micro-batch of {}, and with less than {} a process has nothing to do",
              layout.to_string(), part, config.train.micro_tokens, kLeastTokens);
  }
  return config;
}

// The axes that are tried beside data and context.
struct Most {
  int64_t experts = 1, tensor = 1, pipeline = 1;
};

// Calls f(layout) for every way to write a number of processes as a product of axes.
template <class F>
void for_each_layout(int64_t processes, const Most& most, F&& f) {
  for (const int64_t tensor : divisors(processes)) {
    for (const int64_t pipeline : divisors(processes / tensor)) {
      const int64_t replicas = processes / tensor / pipeline;
      for (const int64_t context : divisors(replicas)) {
        for (const int64_t expert : divisors(replicas)) {
          if (expert > most.experts || tensor > most.tensor || pipeline > most.pipeline) continue;
          f(dist::Layout{.data = replicas / context,
                         .expert = expert,
                         .context = context,
                         .pipeline = pipeline,
                         .tensor = tensor});
        }
      }
    }
  }
}

// Calls f(config) for the legal layouts; what is said of the others.
template <class F>
std::vector<std::string> for_each_legal(const RunConfig& run, int64_t processes, const Most& most, F&& f) {
  std::vector<std::string> refused;
  for_each_layout(processes, most, [&](const dist::Layout& layout) {
    std::optional<RunConfig> config;
    try {
      config = run_on(run, layout);
    } catch (const UserError& error) {
      refused.push_back(error.what());
      return;
    }
    f(*config);
  });
  return refused;
}

// One process of a layout, with nothing behind it.
struct DryProcess {
  dist::DryMesh mesh;
  model::Model model;

  DryProcess(const RunConfig& run, const model::ModelConfig& shape, const Target& target, int64_t rank)
      : mesh(run.parallel, static_cast<int>(rank), target.processes_per_node), model(shape, options(run, shape)) {}

 private:
  model::ModelOptions options(const RunConfig& run, const model::ModelConfig& shape) {
    model::ModelOptions options = run.model_options(shape);
    options.mesh = mesh.get();
    options.expert_imbalance = 1;
    return options;
  }
};

std::vector<int64_t> sequences(const RunConfig& run) {
  std::vector<int64_t> offsets;
  for (int64_t t = 0; t <= run.train.micro_tokens; t += run.data.context) offsets.push_back(t);
  return offsets;
}

int64_t micro_batches(const RunConfig& run) { return run.micro_batches_per_step() / run.parallel.data; }

// Products of a step, with what is computed again, in a process whose share of routed tokens is the even one. That is
// what it would do with all experts for its own tokens.
double product_flops(RunConfig run, const model::ModelConfig& shape, const Target& target, int64_t rank) {
  run.parallel.expert = 1;
  const DryProcess process(run, shape, target, rank);
  Arena arena = Arena::dry();
  Ledger ledger;
  Context ctx{Device::dry, arena, &ledger, run.train.product, run.device};
  Stepper stepper(ctx, process.model, run);
  const std::vector<int64_t> offsets = sequences(run);
  const MicroBatch example{.offsets = offsets};
  stepper.accumulate(ctx, std::span(&example, 1), offsets.back());
  const double micro_batch = double(ledger.total().gemm_flops);
  stepper.finish(ctx, 0, 0);
  return double(ledger.total().gemm_flops) + double(micro_batches(run) - 1) * micro_batch;
}

// Prices of the layouts of one run and number of processes.
class Prices {
 public:
  Prices(const model::ModelConfig& shape, const Target& target) : shape_(shape), target_(target) {}

  LayoutPlan of(const RunConfig& run) {
    LayoutPlan plan;
    plan.layout = run.parallel;
    plan.micro_tokens = run.train.micro_tokens;
    plan.memory = assumed_plan(run).memory;
    plan.fits = plan.memory.fits(target_.usable_bytes);
    plan.product_seconds = products_of(run) / target_.flops_per_s;
    plan.idle_seconds = plan.product_seconds * double(run.parallel.pipeline - 1) / double(micro_batches(run));
    if (run.parallel.processes() == 1) return plan;
    for (int64_t stage = 0; stage < run.parallel.pipeline; ++stage) add_exchanges(run, stage, plan);
    return plan;
  }

 private:
  // Of the first process of a stage for all of it, and of the stage that needs longest.
  void add_exchanges(const RunConfig& run, int64_t stage, LayoutPlan& plan) const {
    const int64_t processes = run.parallel.processes() / run.parallel.pipeline;
    const DryProcess process(run, shape_, target_, stage * processes);
    const std::vector<std::vector<int64_t>> batches(size_t(micro_batches(run)), sequences(run));
    const std::vector<model::RouterOptions> routers(size_t(process.model.moe_layers()), {.balance = run.balance});
    double seconds = 0;
    for (const Flow& flow : step_flows(process.model, run, routers, batches)) {
      plan.inside += double(processes) * flow.inside;
      plan.across += double(processes) * flow.across;
      seconds += seconds_of(flow, target_);
    }
    plan.exchange_seconds = std::max(plan.exchange_seconds, seconds);
  }

  // Of the busiest stage, in its first process or the last, which reads the keys of all others along the context axis.
  double products_of(const RunConfig& run) {
    const dist::Layout& layout = run.parallel;
    const auto [found, added] = products_.try_emplace({layout.context, layout.pipeline, layout.tensor}, 0);
    const int64_t processes = layout.processes() / layout.pipeline;
    for (int64_t stage = 0; added && stage < layout.pipeline; ++stage) {
      for (const int64_t rank : {stage * processes, (stage + 1) * processes - 1}) {
        found->second = std::max(found->second, product_flops(run, shape_, target_, rank));
      }
    }
    return found->second;
  }

  const model::ModelConfig& shape_;
  const Target& target_;
  std::map<std::array<int64_t, 3>, double> products_;  // by all axes that leave one length of the data axis
};

std::string gib(double bytes) { return fmt::format("{:.1f} GiB", bytes / double(int64_t{1} << 30)); }

// What decides between this layout and the one that wins.
std::string what_it_loses(const LayoutPlan& plan, const LayoutPlan& best, const Target& target) {
  if (!plan.fits) {
    const bool state = double(plan.memory.static_bytes - plan.memory.gradient_bytes) >
                       MemoryPlan::kMostState * double(target.usable_bytes);
    return fmt::format(
        "does not fit: {} of {} and {} % of {} may be taken", state ? "state" : "a peak",
        gib(double(state ? plan.memory.static_bytes - plan.memory.gradient_bytes : plan.memory.planned_peak)),
        state ? 70 : 95, gib(double(target.usable_bytes)));
  }
  const double exchanges = plan.exchange_seconds - best.exchange_seconds, idle = plan.idle_seconds - best.idle_seconds,
               products = plan.product_seconds - best.product_seconds;
  const double percent = 100 * (plan.seconds() / best.seconds() - 1);
  if (percent < 0.05) return "as fast";
  return fmt::format("{:+.1f} %: {}", percent,
                     idle > std::max(exchanges, products) ? "waits longer for the pipeline to fill and to drain"
                     : exchanges > products               ? "more to exchange"
                                                          : "more to compute in the busiest process");
}

std::string why_it_wins(const LayoutPlans& plans) {
  const LayoutPlan& best = plans.legal.front();
  const std::string exchanges =
      fmt::format("{:.1f} % of its step are exchanges", 100 * best.exchange_seconds / best.seconds());
  const auto fitting = std::ranges::count_if(plans.legal, &LayoutPlan::fits);
  if (fitting == 1) {
    return fmt::format("the only one that {}; {}", plans.legal.size() == 1 ? "is legal" : "fits", exchanges);
  }
  return fmt::format("the fastest of {} that fit; {}", fitting, exchanges);
}

}  // namespace

LayoutPlans plan_layouts(const RunConfig& run, int64_t processes, const Target& target) {
  const model::ModelConfig shape = model::load_model_config(run.model_file);
  LayoutPlans plans;
  Prices prices(shape, target);
  const Most most{std::max<int64_t>(shape.moe.experts, 1), target.processes_per_node, shape.layers};
  plans.refused =
      for_each_legal(run, processes, most, [&](const RunConfig& c) { plans.legal.push_back(prices.of(c)); });
  std::ranges::stable_sort(plans.legal, [](const LayoutPlan& a, const LayoutPlan& b) {
    return a.fits != b.fits ? a.fits
           : a.fits         ? a.seconds() < b.seconds()
                            : a.memory.planned_peak < b.memory.planned_peak;
  });
  for (LayoutPlan& plan : plans.legal) plan.why = what_it_loses(plan, plans.legal.front(), target);
  if (!plans.legal.empty() && plans.legal.front().fits) plans.legal.front().why = why_it_wins(plans);
  return plans;
}

std::vector<int64_t> nearest_processes(const RunConfig& run, int64_t processes) {
  const auto has_legal = [&](int64_t n) {
    bool found = false;  // experts and heads may always stay where they are
    for_each_legal(run, n, {}, [&](const RunConfig&) { found = true; });
    return found;
  };
  std::vector<int64_t> nearest;
  for (const int64_t direction : {-1, 1}) {
    for (int64_t n = processes + direction; n > 0 && n <= 2 * processes; n += direction) {
      if (!has_legal(n)) continue;
      nearest.push_back(n);
      break;
    }
  }
  return nearest;
}

std::string parallel_lines(const LayoutPlan& plan, const RunConfig& run) {
  std::string lines;
  if (plan.micro_tokens != run.train.micro_tokens) {
    lines += fmt::format("[train]\nmicro_tokens = {}  # instead of {}\n", plan.micro_tokens, run.train.micro_tokens);
  }
  const dist::Layout& l = plan.layout;
  return lines + fmt::format("[parallel]\ndata = {}\nexpert = {}\ncontext = {}\npipeline = {}\ntensor = {}\n", l.data,
                             l.expert, l.context, l.pipeline, l.tensor);
}

}  // namespace tessera::train
