#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/output.h"
#include "cli/run_file.h"
#include "config/options.h"
#include "core/log.h"
#include "data/store.h"
#include "dist/agreement.h"
#include "dist/job.h"
#include "dist/mesh.h"
#include "model/config.h"
#include "train/trainer.h"

namespace tessera::cli {
namespace {

using train::Progress;
using train::RunResult;

struct Args {
  RunFile run;
  bool json = false;
};

// Of the layer that is worst.
double worst(const train::StepReport& report, double ops::router::BalanceReport::*figure) {
  double most = 0;
  for (const auto& layer : report.balance) most = std::max(most, layer.*figure);
  return most;
}

std::string step_line(const Progress& p) {
  const double max_vio = worst(p.row.report, &ops::router::BalanceReport::max_vio);
  return fmt::format("step {}/{}  loss {:.3f}  {:.3f} bits/byte  MaxVio {:.2f}  {:.0f} tokens/s  {} left", p.row.step,
                     p.steps, p.row.loss, p.row.bits_per_byte, max_vio, p.row.tokens_per_s,
                     human_seconds(p.seconds_left));
}

std::string eval_line(const Progress& p) {
  const auto& e = *p.eval;
  return fmt::format(
      "step {}/{}  held-out {:.3f} bits/byte  loss {:.3f}  MaxVio {:.2f} (floor {:.2f})  dead experts {}", p.row.step,
      p.steps, e.bits_per_byte, e.loss, e.routing.max_vio, e.routing.sampling_floor, e.routing.dead_experts);
}

void report(const Progress& p) {
  if (p.row.tokens > 0) show_progress(step_line(p));
  if (p.eval) {
    clear_progress();
    log_info("{}", eval_line(p));
  }
}

// What all processes together sent in a step, beside what the formulas give for the layout.
std::string traffic_text(const std::vector<train::AxisTraffic>& traffic) {
  const auto bytes = [](double n) { return human_bytes(std::llround(n)); };
  Table table({"bytes of a step", "inside a node", "across nodes", "by formula", "counted over formula"});
  std::string rows;
  for (const train::AxisTraffic& a : traffic) {
    const bool known = a.formula() > 0;
    table.add({a.axis, bytes(a.inside), bytes(a.across), known ? bytes(a.formula()) : "none",
               known ? fmt::format("{:+.2f} %", 100 * (a.bytes() / a.formula() - 1)) : ""});
    if (a.balanced_per_token == 0) continue;
    rows += fmt::format(
        "a token's row went to {:.3f} other processes a layer, with evenly random routing to {:.3f}; by formula with "
        "the "
        "rows sent {}, {:+.2f} %\n",
        a.rows_per_token, a.balanced_per_token, bytes(a.formula_at_rows), 100 * (a.bytes() / a.formula_at_rows - 1));
  }
  return table.text() + rows;
}

std::string summary(const train::RunConfig& config, const RunResult& r) {
  std::string text = r.resumed_from >= 0 ? fmt::format("resumed from step {}\n", r.resumed_from) : "";
  text += fmt::format("{} at step {} of {}: {} tokens, {} here\n", r.stopped_early ? "stopped" : "finished", r.step,
                      config.train.steps, human_count(double(r.tokens)), human_seconds(r.seconds));
  if (r.last_eval.tokens > 0) {
    text += fmt::format("held-out text: {:.3f} -> {:.3f} bits/byte\n", r.first_eval.bits_per_byte,
                        r.last_eval.bits_per_byte);
    text += fmt::format(
        "experts: MaxVio {:.2f} in the last step, {:.2f} on held-out text (sampling floors {:.2f}, {:.2f}), {} dead\n",
        worst(r.last_step, &ops::router::BalanceReport::max_vio), r.last_eval.routing.max_vio,
        worst(r.last_step, &ops::router::BalanceReport::floor), r.last_eval.routing.sampling_floor,
        r.last_eval.routing.dead_experts);
  }
  text +=
      fmt::format("memory: {} planned, {} used at peak\n", human_bytes(r.plan.planned_peak), human_bytes(r.peak_bytes));
  if (!r.traffic.empty()) text += traffic_text(r.traffic);
  text += fmt::format("run:        {}\nmetrics:    {}/metrics.jsonl\ncheckpoint: {}\n", config.dir, config.dir,
                      r.checkpoint);
  return text;
}

void print_result(const Args& args, const train::RunConfig& config, const RunResult& r) {
  if (!args.json) return print(summary(config, r));
  print_json({{"step", r.step},
              {"steps", config.train.steps},
              {"stopped_early", r.stopped_early},
              {"resumed_from", r.resumed_from},
              {"tokens", r.tokens},
              {"seconds", r.seconds},
              {"first_bits_per_byte", r.first_eval.bits_per_byte},
              {"bits_per_byte", r.last_eval.bits_per_byte},
              {"train_max_vio", worst(r.last_step, &ops::router::BalanceReport::max_vio)},
              {"train_sampling_floor", worst(r.last_step, &ops::router::BalanceReport::floor)},
              {"max_vio", r.last_eval.routing.max_vio},
              {"sampling_floor", r.last_eval.routing.sampling_floor},
              {"dead_experts", r.last_eval.routing.dead_experts},
              {"static_bytes", r.plan.static_bytes},
              {"planned_peak_bytes", r.plan.planned_peak},
              {"peak_bytes", r.peak_bytes},
              {"traffic", nlohmann::ordered_json::parse(train::to_json(r.traffic))},
              {"run", config.dir},
              {"checkpoint", r.checkpoint}});
}

// What all processes of a run must share: the program, the model, the data and every key of the run.
dist::Facts facts_of(train::RunConfig config) {
  dist::Facts facts = {{"version", TESSERA_VERSION},
                       {"binary", dist::hash_of_binary()},
                       {"model", model::load_model_config(config.model_file).fingerprint()},
                       {"data", data::Store(config.data.store + "/train").meta().fingerprint}};
  config::Options options;
  config.bind(options);  // what is set now counts as default
  for (const config::KeyInfo& key : options.keys()) facts.emplace_back(key.key, key.default_value);
  return facts;
}

void run(const Args& args) {
  dist::Job job;
  train::RunConfig config;
  RunResult result;
  job.run([&] {
    config = args.run.load();
    config.require_machine(args.run.path());
    job.set(config.job);
    dist::Communicator world = job.world();
    if (!world.alone()) dist::require_same(world, facts_of(config));
    if (config.device == Device::cuda) job.use_gpus();
    dist::Mesh mesh(config.parallel, job.host(), job.gpu());
    train::Trainer trainer(config, world.alone() ? nullptr : &mesh);
    result = trainer.run([&](const Progress& p) {
      if (job.first()) report(p);
    });
  });
  if (!job.first()) return;
  clear_progress();
  print_result(args, config, result);
}

}  // namespace

void add_train(CLI::App& app) {
  auto args = std::make_shared<Args>();
  CLI::App* command = app.add_subcommand("train", "Train a model; resumes by itself from the newest good checkpoint");
  args->run.add_to(*command, false);
  command->add_flag("--json", args->json, "Print the result as JSON");
  command->callback([args] { run(*args); });
}

}  // namespace tessera::cli
