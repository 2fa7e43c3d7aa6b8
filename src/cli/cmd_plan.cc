#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "cli/run_file.h"
#include "core/parallel.h"
#include "model/accounting.h"
#include "train/plan_run.h"

namespace tessera::cli {
namespace {

constexpr double kH200UsableGib = 139;  // of its 140.4, less the driver's own

struct Args {
  std::string model_file;
  int64_t context = 8192;
  bool json = false;
};

void plan_model(const Args& args) {
  const model::Model model(model::load_model_config(args.model_file), {});
  const model::ModelCosts c = model::model_costs(model, args.context);
  if (args.json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const auto& r : c.by_component) {
      rows.push_back({{"component", r.component},
                      {"total_params", r.total_params},
                      {"active_params", r.active_params},
                      {"tensors", r.tensors}});
    }
    return print_json({{"model", model.config().name},
                       {"total_params", c.total_params},
                       {"active_params", c.active_params},
                       {"kda_state_bytes_per_sequence", c.kda_state_bytes_per_sequence},
                       {"conv_bytes_per_sequence", c.conv_bytes_per_sequence},
                       {"latent_cache_bytes_per_token", c.latent_cache_bytes_per_token},
                       {"context_tokens", c.context_tokens},
                       {"forward_flops_per_token", c.forward_flops_per_token},
                       {"step_flops_per_token", c.step_flops_per_token},
                       {"activation_bytes", c.activation_bytes},
                       {"by_component", rows}});
  }
  Table components({"component", "parameters", "active for a token", "tensors"});
  for (const auto& r : c.by_component) {
    components.add({r.component, human_count(double(r.total_params)), human_count(double(r.active_params)),
                    std::to_string(r.tensors)});
  }
  components.add({"total", human_count(double(c.total_params)), human_count(double(c.active_params)), ""});
  Table facts;
  facts.add({"KDA state", human_bytes(c.kda_state_bytes_per_sequence) + " a sequence (float32), whatever its length"});
  facts.add({"convolution windows", human_bytes(c.conv_bytes_per_sequence) + " a sequence (bf16)"});
  facts.add({"latent cache", fmt::format("{} B a token (bf16)", c.latent_cache_bytes_per_token)});
  facts.add({fmt::format("step at {} tokens", c.context_tokens),
             fmt::format("{}FLOP a token ({}FLOP forward), {} of activations in float32",
                         human_count(double(c.step_flops_per_token)), human_count(double(c.forward_flops_per_token)),
                         human_bytes(c.activation_bytes))});
  print(fmt::format("{}: {} parameters, {} active\n\n", model.config().name, human_count(double(c.total_params)),
                    human_count(double(c.active_params))) +
        components.text() + "\n" + facts.text());
}

struct MemoryArgs {
  RunFile run;
  double memory_gib = 0;  // 0: not given
  bool json = false;
};

// A target and where the figure comes from.
struct Usable {
  int64_t bytes;
  std::string source;
};

Usable usable_of(const MemoryArgs& args, const train::RunConfig& config) {
  constexpr double kGib = double(int64_t{1} << 30);
  const Device device = config.device;
  if (args.memory_gib > 0) return {static_cast<int64_t>(args.memory_gib * kGib), "--memory"};
  if (device == Device::cpu) {
    const int64_t sharing = train::processes_of_machine(config);
    return {train::usable_bytes(device) / sharing,
            sharing == 1 ? "this machine, now" : fmt::format("this machine, now, of one of {} processes", sharing)};
  }
  const std::vector<GpuInfo> gpus = list_gpus();
  if (!gpus.empty()) return {train::usable_bytes(device), "free on the " + gpus.front().name + " here"};
  return {static_cast<int64_t>(kH200UsableGib * kGib), "of one H200 (141 GB); there is no GPU here"};
}

const char* kind_name(train::MemoryUse::Kind kind) {
  switch (kind) {
    case train::MemoryUse::Kind::state: return "state";
    case train::MemoryUse::Kind::activations: return "activations";
    case train::MemoryUse::Kind::workspace: return "workspace";
  }
  return "";
}

void print_memory(const train::RunConfig& config, const train::RunPlan& plan, const Usable& usable,
                  const std::vector<train::Change>& changes, bool json) {
  const train::MemoryPlan& m = plan.memory;
  const bool fits = m.fits(usable.bytes);
  const auto limit = [&](double share) { return static_cast<int64_t>(share * double(usable.bytes)); };
  const int64_t most_state = limit(m.kMostState), most_peak = limit(m.kMostPeak);
  if (json) {
    nlohmann::ordered_json uses = nlohmann::ordered_json::array(), fitting = nlohmann::ordered_json::array();
    for (const auto& use : m.uses) {
      uses.push_back({{"what", use.what},
                      {"kind", kind_name(use.kind)},
                      {"at_peak_bytes", use.at_peak_bytes},
                      {"most_bytes", use.most_bytes}});
    }
    for (const auto& change : changes) {
      fitting.push_back({{"settings", change.settings}, {"peak_bytes", change.memory.planned_peak}});
    }
    return print_json({{"fits", fits},
                       {"device", config.device == Device::cuda ? "cuda" : "cpu"},
                       {"static_bytes", m.static_bytes},
                       {"gradient_bytes", m.gradient_bytes},
                       {"peak_bytes", m.planned_peak},
                       {"usable_bytes", usable.bytes},
                       {"static_without_gradients_limit_bytes", most_state},
                       {"peak_limit_bytes", most_peak},
                       {"context_tokens", config.data.context},
                       {"micro_tokens", config.train.micro_tokens},
                       {"documents_assumed", plan.assumed},
                       {"processes", config.parallel.processes()},
                       {"rank", plan.rank},
                       {"uses", uses},
                       {"changes", fitting}});
  }
  Table table({"what", "kind", "at the peak", "at most"});
  for (const auto& use : m.uses) {
    table.add({use.what, kind_name(use.kind), human_bytes(use.at_peak_bytes), human_bytes(use.most_bytes)});
  }
  table.add({"peak", "", human_bytes(m.planned_peak), ""});
  const int64_t processes = config.parallel.processes();
  std::string text = fmt::format("{}, {}{}: micro-batches of {} tokens, {}\n\n{}\n", config.model_file,
                                 config.device == Device::cuda ? "cuda" : "cpu",
                                 processes == 1 ? ""
                                                : fmt::format(", rank {} of {} ({}), which needs most", plan.rank,
                                                              processes, config.parallel.to_string()),
                                 config.train.micro_tokens,
                                 plan.assumed ? fmt::format("assumed to be documents of {} tokens, as {} is not there",
                                                            config.data.context, config.data.store)
                                              : "documents as " + config.data.store + " has them",
                                 table.text());
  Table rule;
  rule.add({"usable", human_bytes(usable.bytes), usable.source});
  rule.add({"state without gradients", human_bytes(m.static_bytes - m.gradient_bytes),
            fmt::format("at most 70 %: {}", human_bytes(most_state))});
  rule.add({"peak", human_bytes(m.planned_peak), fmt::format("at most 95 %: {}", human_bytes(most_peak))});
  text += rule.text() + (fits ? "\nfits\n" : "\ndoes not fit");
  if (!fits && changes.empty()) text += ", and no setting makes it fit: choose a smaller model\n";
  if (!changes.empty()) text += "; the cheapest settings that make it fit:\n";
  for (const auto& change : changes) {
    text += fmt::format("  {}  ->  {}\n", change.settings, human_bytes(change.memory.planned_peak));
  }
  print(text);
}

void plan_memory(const MemoryArgs& args) {
  const train::RunConfig config = args.run.load();
  if (config.device == Device::cpu)
    set_thread_count(std::max<int>(1, thread_count() / int(processes_of_machine(config))));
  const train::RunPlan plan = train::plan_run(config);
  const Usable usable = usable_of(args, config);
  std::vector<train::Change> changes;
  if (!plan.memory.fits(usable.bytes)) changes = train::cheapest_changes(config, usable.bytes);
  print_memory(config, plan, usable, changes, args.json);
}

void add_memory(CLI::App& group) {
  auto args = std::make_shared<MemoryArgs>();
  CLI::App* command = group.add_subcommand(
      "memory", "What a run takes, by a dry run of its batches; neither a GPU nor the token store need be there");
  args->run.add_to(*command, true);
  command
      ->add_option("--memory", args->memory_gib,
                   fmt::format("GiB that are usable; not given: what is free here, for cuda without a GPU {} (H200)",
                               kH200UsableGib))
      ->type_name("GIB")
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", args->json, "Print figures as JSON");
  command->callback([args] { plan_memory(*args); });
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* group = app.add_subcommand("plan", "Answers before a run");
  group->require_subcommand(1);
  auto args = std::make_shared<Args>();
  CLI::App* command = group->add_subcommand("model", "Parameters, state and cache bytes, and FLOPs of a model file");
  command->add_option("model", args->model_file, "Model file (configs/models/*.toml)")->required();
  command->add_option("--context", args->context, "Tokens of the sequence that is run dry")
      ->capture_default_str()
      ->check(at_least(1));
  command->add_flag("--json", args->json, "Print figures as JSON");
  command->callback([args] { plan_model(*args); });
  add_memory(*group);
  add_plan_layout(*group);
  add_plan_manifests(*group);
}

}  // namespace tessera::cli
