#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "ops/gemm/gemm.h"
#include "ops/kda/cases.h"
#include "selfcheck/selfcheck.h"
#include "train/bench_step.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Args {
  train::StepBenchOptions step;
  std::string op, model = "nano", product = "f32";
  int64_t tokens = 0, heads = 8, dim = 128;
  bool kda_shape = false;  // one of --tokens, --heads, --dim was given
  bool json = false;
};

// "small" stands for configs/models/small.toml
std::string model_path(const std::string& model) {
  return std::filesystem::exists(model) ? model : "configs/models/" + model + ".toml";
}

void print_step(const train::StepBench& b, bool json) {
  if (json) {
    Json rows = Json::array();
    for (const auto& r : b.by_op)
      rows.push_back({{"op", r.op}, {"seconds", r.seconds}, {"share", r.share}, {"gemm_flops_per_s", r.gemm_flops}});
    return print_json({{"model", b.model},
                       {"context_tokens", b.context},
                       {"step_tokens", b.tokens},
                       {"micro_tokens", b.micro_tokens},
                       {"step_s", b.step_s},
                       {"first_step_s", b.first_step_s},
                       {"tokens_per_s", b.tokens_per_s},
                       {"flops_per_token", b.flops_per_token},
                       {"gflops_per_s", b.achieved_flops / 1e9},
                       {"gemm_gflops_per_s", b.gemm_rate / 1e9},
                       {"gemm_share", b.gemm_share},
                       {"mfu", b.mfu},
                       {"static_bytes", b.static_bytes},
                       {"planned_peak_bytes", b.planned_peak_bytes},
                       {"peak_bytes", b.peak_bytes},
                       {"process_peak_bytes", b.process_peak_bytes},
                       {"by_op", rows}});
  }
  Table facts;
  const std::string parts = b.micro_tokens < b.tokens ? fmt::format(" in parts of {}", b.micro_tokens) : "";
  facts.add({"model", fmt::format("{}, sequences of {} tokens, {} a step{}", b.model, b.context, b.tokens, parts)});
  facts.add({"step", fmt::format("{}  ({:.0f} tokens/s; first step after {})", human_seconds(b.step_s), b.tokens_per_s,
                                 human_seconds(b.first_step_s))});
  const std::string mfu = b.mfu == b.gemm_share ? "" : fmt::format("; {:.1f} % of the chip's peak (MFU)", 100 * b.mfu);
  facts.add({"products", fmt::format("{:.1f} GFLOP/s of {:.1f} that this machine's GEMM reaches: {:.0f} %{}",
                                     b.achieved_flops / 1e9, b.gemm_rate / 1e9, 100 * b.gemm_share, mfu)});
  facts.add({"memory", fmt::format("{} planned, {} at peak in the arena, {} resident in the process",
                                   human_bytes(b.planned_peak_bytes), human_bytes(b.peak_bytes),
                                   human_bytes(b.process_peak_bytes))});
  Table ops({"op", "ms a step", "share %", "GFLOP/s"});
  for (const auto& r : b.by_op) {
    ops.add({r.op, fmt::format("{:.1f}", 1e3 * r.seconds), fmt::format("{:.1f}", 100 * r.share),
             fmt::format("{:.1f}", r.gemm_flops / 1e9)});
  }
  print(facts.text() + "\n" + ops.text());
}

Json speed_json(const check::Speed& s, double rate) {
  return {{"op", s.op},
          {"shape", s.shape},
          {"forward_ms", s.forward_ms},
          {"forward_backward_ms", s.forward_backward_ms},
          {"forward_gflops_per_s", s.forward_flops / s.forward_ms / 1e6},
          {"forward_backward_gflops_per_s", s.forward_backward_flops / s.forward_backward_ms / 1e6},
          {"forward_gbytes_per_s", s.forward_bytes / s.forward_ms / 1e6},
          {"gemm_share", s.forward_backward_flops / s.forward_backward_ms * 1e3 / rate},
          {"floor_ms", s.forward_flops / rate * 1e3},
          {"extra_bytes", s.extra_bytes}};
}

void bench_ops(const Args& args) {
  const double rate = ops::measured_gemm_rate(Product::f32, args.step.device);
  std::vector<check::Speed> rows;
  for (const check::OpTable* table : selfcheck::op_tables()) {
    if (args.op != "all" && args.op != table->op) continue;
    if (args.op == "kda" && args.kda_shape) {
      rows.push_back(check::measure(
          *table, ops::kda::speed_case(args.tokens > 0 ? args.tokens : 8192, args.heads, args.dim), args.step.device));
      continue;
    }
    std::vector<check::SpeedCase> cases = table->speed;
    if (args.step.device == Device::cuda) cases.insert(cases.end(), table->cuda_speed.begin(), table->cuda_speed.end());
    for (const check::SpeedCase& c : cases) {
      show_progress(table->op + " " + c.name);
      rows.push_back(check::measure(*table, c, args.step.device));
    }
  }
  clear_progress();
  if (rows.empty()) {
    std::string known;
    for (const check::OpTable* table : selfcheck::op_tables()) known += table->op + ", ";
    fail_user("no op named '{}' to time; known: step, all, {}", args.op, known.substr(0, known.size() - 2));
  }
  if (args.json && rows.size() == 1) return print_json(speed_json(rows[0], rate));
  if (args.json) {
    Json all = Json::array();
    for (const auto& s : rows) all.push_back(speed_json(s, rate));
    return print_json({{"gemm_gflops_per_s", rate / 1e9}, {"ops", all}});
  }
  Table table({"op", "shape", "forward ms", "with backward ms", "GFLOP/s", "GB/s", "of GEMM %"});
  for (const auto& s : rows) {
    table.add({s.op, s.shape, fmt::format("{:.3f}", s.forward_ms), fmt::format("{:.3f}", s.forward_backward_ms),
               fmt::format("{:.1f}", s.forward_backward_flops / s.forward_backward_ms / 1e6),
               fmt::format("{:.1f}", s.forward_backward_bytes / s.forward_backward_ms / 1e6),
               fmt::format("{:.0f}", s.forward_backward_flops / s.forward_backward_ms * 1e5 / rate)});
  }
  print(table.text() + fmt::format("\nthis machine's {} GEMM: {:.1f} GFLOP/s; rates are of forward with backward\n",
                                   args.step.device == Device::cuda ? "bf16" : "float32", rate / 1e9));
}

void run(Args& args) {
  if (args.op != "step") return bench_ops(args);
  args.step.model_file = model_path(args.model);
  if (args.tokens > 0) args.step.tokens = args.tokens;
  args.step.product = args.product == "bf16" ? Product::bf16 : Product::f32;
  if (args.step.device == Device::cpu && args.step.product == Product::bf16 && !ops::cpu_has_bf16_products()) {
    fail_user("--product bf16: this CPU has no bf16 products; use f32");
  }
  print_step(train::bench_step(args.step), args.json);
}

}  // namespace

void add_bench(CLI::App& app) {
  auto args = std::make_shared<Args>();
  CLI::App* command = app.add_subcommand("bench", "Time an op, all ops, or a whole training step");
  command->add_option("what", args->op, "step, all, or the name of an op")->required();
  command->add_option("--model", args->model, "step: model file, or name of one in configs/models")
      ->capture_default_str();
  command->add_option("--context", args->step.context, "step: tokens of a sequence")
      ->capture_default_str()
      ->check(at_least(1));
  command->add_option("--tokens", args->tokens, "step: tokens of a step (8192); kda: tokens (8192)")
      ->check(at_least(1));
  command
      ->add_option("--micro-tokens", args->step.micro_tokens,
                   "step: tokens of a micro-batch, whose gradients a step adds up; default: the whole step")
      ->check(at_least(1));
  command->add_option("--steps", args->step.steps, "step: steps to time")->capture_default_str()->check(at_least(1));
  command->add_option("--product", args->product, "step: operands of matrix products")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_flag("--recompute-all", args->step.recompute_all, "step: recompute every layer in backward");
  command->add_flag("--recompute-selective", args->step.recompute_selective, "step: recompute what is cheap");
  command
      ->add_option("--ffn-block-tokens", args->step.ffn_block_tokens,
                   "step: tokens that a feed-forward part takes at a time; 0: all at once")
      ->capture_default_str()
      ->check(at_least(0));
  command->add_flag("--kda-only", args->step.kda_only, "step: make every mixer KDA, for cost against length");
  command->add_option("--heads", args->heads, "kda: heads")->capture_default_str()->check(at_least(1));
  command->add_option("--dim", args->dim, "kda: key and value width of a head")
      ->capture_default_str()
      ->check(at_least(1));
  add_device_option(*command, args->step.device);
  command->add_flag("--json", args->json, "Print figures as JSON");
  command->callback([args, command] {
    args->kda_shape = command->count("--tokens") + command->count("--heads") + command->count("--dim") > 0;
    run(*args);
  });
}

}  // namespace tessera::cli
