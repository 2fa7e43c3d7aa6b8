#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "cli/run_file.h"
#include "core/parallel.h"
#include "train/plan_layout.h"

namespace tessera::cli {
namespace {

constexpr size_t kRows = 6;  // of the table; --json has all
constexpr size_t kReasons = 3;

struct Args {
  RunFile run;
  int64_t processes = 0;
  std::string gpu = "h200";
  double memory_gib = 0, tflops = 0, inside_gbytes = 0, across_gbytes = 0;  // 0: not given
  bool json = false;
};

train::Target target_of(const Args& args, train::RunConfig& config) {
  train::Target target;
  if (config.device == Device::cuda) {
    target = *train::gpu_target(args.gpu);
    if (config.job.ranks_per_node > 0) target.processes_per_node = config.job.ranks_per_node;
  } else {
    const int64_t set = config.job.ranks_per_node;
    target = train::cpu_target(set > 0 ? std::min(set, args.processes) : args.processes);
    set_thread_count(std::max<int>(1, thread_count() / static_cast<int>(target.processes_per_node)));
  }
  config.job.ranks_per_node = target.processes_per_node;
  if (args.memory_gib > 0) target.usable_bytes = std::llround(args.memory_gib * double(int64_t{1} << 30));
  if (args.tflops > 0) target.flops_per_s = args.tflops * 1e12;
  if (args.inside_gbytes > 0) target.inside.bytes_per_s = args.inside_gbytes * 1e9;
  if (args.across_gbytes > 0) target.across.bytes_per_s = args.across_gbytes * 1e9;
  return target;
}

std::string count(int64_t n, const char* one, const char* many) { return fmt::format("{} {}", n, n == 1 ? one : many); }

[[noreturn]] void refuse_illegal(const Args& args, const train::RunConfig& config, const train::LayoutPlans& plans) {
  std::string nearest;
  for (const int64_t n : train::nearest_processes(config, args.processes)) {
    nearest += fmt::format("{}--processes {}", nearest.empty() ? "" : " or ", n);
  }
  std::string reasons;
  for (size_t i = 0; i < std::min(kReasons, plans.refused.size()); ++i) reasons += "\n  " + plans.refused[i];
  fail_user("{}: no layout of {} is legal{}; {}", args.run.path(), count(args.processes, "process", "processes"),
            reasons, nearest.empty() ? "raise train.tokens_per_step" : "the nearest that works: " + nearest);
}

[[noreturn]] void refuse_too_large(const Args& args, const train::RunConfig& config, const train::LayoutPlan& least,
                                   const train::Target& target) {
  train::RunConfig run = config;
  run.parallel = least.layout;
  run.train.micro_tokens = least.micro_tokens;
  std::string changes;
  for (const train::Change& change : train::cheapest_changes(run, target.usable_bytes)) {
    changes += fmt::format("\n  {}  ->  {}", change.settings, human_bytes(change.memory.planned_peak));
  }
  fail_user("{}: no layout of {} fits {} usable bytes each; {} needs least, {}; {}", args.run.path(),
            count(args.processes, "process", "processes"), human_bytes(target.usable_bytes), least.layout.to_string(),
            human_bytes(least.memory.planned_peak),
            changes.empty() ? "take more processes, or a smaller model"
                            : "take more processes, or settings that make it fit:" + changes);
}

void print_plans(const Args& args, const train::RunConfig& config, const train::LayoutPlans& plans,
                 const train::Target& target) {
  Table table({"data", "expert", "context", "pipeline", "tensor", "micro tokens", "memory", "inside a node",
               "across nodes", "a step", "of it exchanges", "why"});
  const auto bytes = [](double n) { return human_bytes(std::llround(n)); };
  const size_t rows = std::min(kRows, plans.legal.size());
  for (const train::LayoutPlan& p : std::span(plans.legal).first(rows)) {
    table.add({std::to_string(p.layout.data), std::to_string(p.layout.expert), std::to_string(p.layout.context),
               std::to_string(p.layout.pipeline), std::to_string(p.layout.tensor), std::to_string(p.micro_tokens),
               human_bytes(p.memory.planned_peak), bytes(p.inside), bytes(p.across), human_seconds(p.seconds()),
               human_seconds(p.exchange_seconds), p.why});
  }
  std::string more =
      plans.legal.size() > rows ? fmt::format("and {} more, in --json\n", plans.legal.size() - rows) : "";
  if (!plans.refused.empty()) {
    more += fmt::format("{} not legal, such as {}\n", plans.refused.size(), plans.refused.front());
  }
  const train::LayoutPlan& best = plans.legal.front();
  print(fmt::format(
      "{} on {}, {} a node, {} usable each; {:.3g} TFLOP/s each, {:.3g} GB/s inside a node, {:.3g} across\n\n{}\n{}"
      "memory is a process's, bytes are those of all processes in a step of {} tokens; sequences of {}\n\n"
      "{}: {} a step, {} tokens/s. For the run file:\n\n{}",
      count(args.processes, "process", "processes"), target.name, target.processes_per_node,
      human_bytes(target.usable_bytes), target.flops_per_s / 1e12, target.inside.bytes_per_s / 1e9,
      target.across.bytes_per_s / 1e9, table.text(), more, config.train.tokens_per_step, config.data.context,
      best.layout.to_string(), human_seconds(best.seconds()),
      human_count(double(config.train.tokens_per_step) / best.seconds()), train::parallel_lines(best, config)));
}

void print_plans_json(const Args& args, const train::LayoutPlans& plans, const train::Target& target) {
  nlohmann::ordered_json layouts = nlohmann::ordered_json::array();
  for (const train::LayoutPlan& p : plans.legal) {
    layouts.push_back({{"data", p.layout.data},
                       {"expert", p.layout.expert},
                       {"context", p.layout.context},
                       {"pipeline", p.layout.pipeline},
                       {"tensor", p.layout.tensor},
                       {"micro_tokens", p.micro_tokens},
                       {"fits", p.fits},
                       {"static_bytes", p.memory.static_bytes},
                       {"peak_bytes", p.memory.planned_peak},
                       {"inside_bytes_per_step", p.inside},
                       {"across_bytes_per_step", p.across},
                       {"step_s", p.seconds()},
                       {"exchange_s", p.exchange_seconds},
                       {"idle_s", p.idle_seconds},
                       {"why", p.why}});
  }
  print_json({{"processes", args.processes},
              {"target", target.name},
              {"processes_per_node", target.processes_per_node},
              {"usable_bytes", target.usable_bytes},
              {"flops_per_s", target.flops_per_s},
              {"inside_bytes_per_s", target.inside.bytes_per_s},
              {"across_bytes_per_s", target.across.bytes_per_s},
              {"layouts", layouts},
              {"refused", plans.refused}});
}

void plan_layout(const Args& args) {
  train::RunConfig config = args.run.load();
  const train::Target target = target_of(args, config);
  const train::LayoutPlans plans = train::plan_layouts(config, args.processes, target);
  if (plans.legal.empty()) refuse_illegal(args, config, plans);
  if (!plans.legal.front().fits) refuse_too_large(args, config, plans.legal.front(), target);
  args.json ? print_plans_json(args, plans, target) : print_plans(args, config, plans, target);
}

}  // namespace

void add_plan_layout(CLI::App& group) {
  auto args = std::make_shared<Args>();
  CLI::App* command = group.add_subcommand(
      "layout", "How so many processes can share a run: memory, bytes and time of each layout, and the best one");
  args->run.add_to(*command, true);
  command->add_option("--processes", args->processes, "Processes to share it; on GPUs one for each")
      ->required()
      ->check(at_least(1));
  command->add_option("--gpu", args->gpu, "GPU of a run on cuda, for its memory, rate and links")
      ->capture_default_str()
      ->check(CLI::IsMember(train::names_of_gpus()));
  const auto positive = [&](const char* flag, double& value, const char* unit, const char* help) {
    command->add_option(flag, value, help)->type_name(unit)->check(CLI::PositiveNumber);
  };
  positive("--memory", args->memory_gib, "GIB", "GiB that each process may use; not given: of the GPU, or free here");
  positive("--tflops", args->tflops, "TFLOPS",
           "What a process reaches in a step (`tessera bench step`); not given: 200 on a GPU, 0.075 a CPU core");
  positive("--inside", args->inside_gbytes, "GB/S", "Line rate of a process inside a node; not given: 450, on CPUs 5");
  positive("--across", args->across_gbytes, "GB/S", "And to other nodes; not given: 50, on CPUs 1.25");
  command->add_flag("--json", args->json, "Print figures as JSON");
  command->callback([args] { plan_layout(*args); });
}

}  // namespace tessera::cli
