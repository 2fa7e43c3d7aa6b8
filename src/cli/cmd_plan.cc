#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "model/accounting.h"

namespace tessera::cli {
namespace {

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
}

}  // namespace tessera::cli
