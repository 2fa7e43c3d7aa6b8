#include <fmt/chrono.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "ckpt/checkpoint.h"
#include "ckpt/diff.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "train/export_checkpoint.h"
#include "train/import_checkpoint.h"
#include "train/saved_model.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct Args {
  std::string path, other, weights, out, dtype = "bf16";
  int64_t keep_last = 3, keep_every_steps = 0;
  bool json = false, tensors = false, shared = false;
};

std::string root_of(const std::string& path) {  // a run directory stands for its checkpoints
  const fs::path inside = fs::path(path) / "checkpoints";
  return fs::is_directory(inside) ? inside.string() : path;
}

std::string date_text(int64_t unix_ms) {
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", fmt::gmtime(static_cast<std::time_t>(unix_ms / 1000)));
}

void list(const Args& args) {
  if (!fs::exists(args.path)) fail_user("{}: no such directory; name a run directory", args.path);
  const auto entries = ckpt::list(root_of(args.path));
  Json rows = Json::array();
  Table table({"step", "size", "written (UTC)", "state", "path"});
  for (const ckpt::Entry& e : entries) {
    rows.push_back({{"step", e.step},
                    {"path", e.path},
                    {"bytes", e.bytes},
                    {"committed", e.committed},
                    {"created_unix_ms", e.created_unix_ms},
                    {"problem", e.problem}});
    table.add({std::to_string(e.step), human_bytes(e.bytes), date_text(e.created_unix_ms),
               e.problem.empty() ? "good" : e.problem, e.path});
  }
  if (args.json) return print_json({{"checkpoints", rows}});
  print(entries.empty() ? "no checkpoints\n" : table.text());
}

void inspect(const Args& args) {
  const ckpt::Inspection i = ckpt::inspect(train::find_checkpoint(args.path));
  const train::SavedState state = train::parse_saved_state(i.manifest.state_json, i.path);
  if (args.json) {
    Json tensors = Json::array();
    for (const auto& t : i.manifest.tensors) {
      tensors.push_back(
          {{"name", t.name}, {"dtype", name_of(t.dtype)}, {"shape", t.shape}, {"bytes", t.bytes}, {"hash", t.hash}});
    }
    return print_json({{"path", i.path},
                       {"step", i.manifest.step},
                       {"run_id", i.manifest.run_id},
                       {"created_unix_ms", i.manifest.created_unix_ms},
                       {"bytes", i.bytes},
                       {"tensor_bytes", i.tensor_bytes},
                       {"files", i.manifest.files.size()},
                       {"model_fingerprint", i.manifest.model_fingerprint},
                       {"tokenizer", state.tokenizer},
                       {"tokens", state.tokens},
                       {"next_sequence", state.next_sequence},
                       {"plan_hash", state.plan_hash},
                       {"learning_rate", state.learning_rate},
                       {"tensors", tensors}});
  }
  Table facts;
  facts.add({"checkpoint", i.path});
  facts.add({"run", i.manifest.run_id});
  facts.add({"step", std::to_string(i.manifest.step)});
  facts.add({"tokens seen", human_count(double(state.tokens))});
  facts.add({"written", date_text(i.manifest.created_unix_ms) + " UTC"});
  facts.add({"size", fmt::format("{} in {} tensors and {} files", human_bytes(i.bytes), i.manifest.tensors.size(),
                                 i.manifest.files.size())});
  facts.add({"model", i.manifest.model_fingerprint});
  facts.add({"tokenizer", state.tokenizer.empty() ? "not recorded" : state.tokenizer});
  facts.add({"data", state.plan_hash.empty()
                         ? "none"
                         : fmt::format("sequence {} of plan {}", state.next_sequence, state.plan_hash)});
  print(facts.text());
  if (!args.tensors) return;
  Table tensors({"tensor", "type", "shape", "size"});
  for (const auto& t : i.manifest.tensors) {
    tensors.add({t.name, std::string(name_of(t.dtype)), Shape(std::span<const int64_t>(t.shape)).to_string(),
                 human_bytes(t.bytes)});
  }
  print("\n" + tensors.text());
}

void verify(const Args& args) {
  // A named checkpoint is verified as it is, damaged or not; of a run, the newest.
  std::string path = args.path;
  if (!fs::exists(fs::path(path) / "manifest.json") && !fs::exists(fs::path(path) / "COMMITTED")) {
    const auto entries = ckpt::list(root_of(path));
    if (entries.empty()) fail_user("{}: holds no checkpoint; name a checkpoint or a run directory", path);
    path = entries.back().path;
  }
  const ckpt::Verification v = ckpt::verify(path);
  if (args.json) {
    Json bad = Json::array();
    for (const auto& b : v.bad) bad.push_back({{"tensor", b.tensor}, {"why", b.why}});
    print_json({{"pass", v.pass}, {"step", v.step}, {"tensors", v.tensors}, {"bad", bad}, {"path", path}});
  } else if (v.pass) {
    print(fmt::format("{}: good: step {}, {} tensors, every byte as written\n", path, v.step, v.tensors));
  } else {
    std::string text = fmt::format("{}: damaged\n", path);
    for (const auto& b : v.bad) text += fmt::format("  {}{}{}\n", b.tensor, b.tensor.empty() ? "" : ": ", b.why);
    print(text);
  }
  if (!v.pass) throw CLI::RuntimeError(1);
}

void import(const Args& args) {
  const train::ImportReport r = train::import_checkpoint(args.path, args.weights, args.out);
  if (args.json) {
    return print_json({{"checkpoint", r.checkpoint},
                       {"tensors", r.tensors},
                       {"total_params", r.parameters},
                       {"layers", r.config.layers},
                       {"width", r.config.width},
                       {"model_toml", model::dump_model_config(r.config)}});
  }
  if (r.checkpoint.empty()) return print(model::dump_model_config(r.config));
  print(fmt::format("{} tensors, {} parameters -> {}\n", r.tensors, human_count(double(r.parameters)), r.checkpoint));
}

void export_model(const Args& args) {
  const train::ExportReport r =
      train::export_checkpoint(args.path, args.out, {.matrices = args.dtype == "f32" ? DType::f32 : DType::bf16});
  if (args.json) {
    return print_json({{"path", r.path}, {"files", r.files}, {"tensors", r.tensors}, {"tensor_bytes", r.tensor_bytes}});
  }
  print(fmt::format("{} tensors, {} in {} safetensors {} -> {}\n", r.tensors, human_bytes(r.tensor_bytes), r.files,
                    r.files == 1 ? "file" : "files", r.path));
}

// Of a checkpoint its tensors; else safetensors as they are.
ckpt::Collection tensors_of(const std::string& path) {
  const bool ours = fs::exists(fs::path(path) / "checkpoints") || fs::exists(fs::path(path) / "manifest.json") ||
                    fs::exists(fs::path(path) / "LATEST");
  return ckpt::open_collection(ours ? (fs::path(train::find_checkpoint(path)) / "data").string() : path);
}

void diff(const Args& args) {
  const ckpt::Diff d = ckpt::diff(tensors_of(args.path), tensors_of(args.other), args.shared);
  if (args.json) {
    Json rows = Json::array();
    for (const auto& t : d.different) {
      rows.push_back({{"name", t.name},
                      {"what", t.what},
                      {"elements", t.elements},
                      {"differing", t.differing},
                      {"largest", t.largest},
                      {"relative", t.relative}});
    }
    print_json({{"same", d.same}, {"different", rows}});
  } else {
    Table table({"tensor", "differing", "of", "largest", "relative", ""});
    for (const auto& t : d.different) {
      table.add({t.name, std::to_string(t.differing), std::to_string(t.elements), fmt::format("{:.3g}", t.largest),
                 fmt::format("{:.3g}", t.relative), t.what});
    }
    print(fmt::format("{} tensors are the same, {} differ\n", d.same, d.different.size()) +
          (d.different.empty() ? "" : "\n" + table.text()));
  }
  if (!d.different.empty()) throw CLI::RuntimeError(1);
}

void prune(const Args& args) {
  for (const std::string& path : ckpt::prune(root_of(args.path), args.keep_last, args.keep_every_steps)) {
    print(path + " removed\n");
  }
}

}  // namespace

void add_ckpt(CLI::App& app) {
  CLI::App* group = app.add_subcommand("ckpt", "List, inspect, verify, compare, export, import and prune checkpoints");
  group->require_subcommand(1);
  auto args = std::make_shared<Args>();
  const auto add = [&](const char* name, const char* help, const char* path_help, void (*run)(const Args&)) {
    CLI::App* command = group->add_subcommand(name, help);
    command->add_option("path", args->path, path_help)->required();
    command->callback([args, run] { run(*args); });
    return command;
  };
  const char* one = "Checkpoint, or a run directory for its newest";
  add("list", "Checkpoints of a run", "Run directory", list)->add_flag("--json", args->json, "Print as JSON");
  CLI::App* inspect_command = add("inspect", "What a checkpoint holds", one, inspect);
  inspect_command->add_flag("--tensors", args->tensors, "Also list every tensor");
  inspect_command->add_flag("--json", args->json, "Print as JSON, with every tensor");
  add("verify", "Read every byte and compare hashes; exit code 1 when damaged", one, verify)
      ->add_flag("--json", args->json, "Print as JSON");
  CLI::App* import_command = add("import", "Make a checkpoint from a published model (safetensors)",
                                 "config.json of the model; alone, its model file is printed", import);
  CLI::Option* weights =
      import_command->add_option("--weights", args->weights, "Safetensors file, index, or directory of them");
  CLI::Option* out = import_command->add_option("--out", args->out, "Directory to put the checkpoint into");
  weights->needs(out);
  out->needs(weights);
  import_command->add_flag("--json", args->json, "Print as JSON");
  CLI::App* export_command =
      add("export", "Make a published model (config.json, safetensors) of a checkpoint", one, export_model);
  export_command->add_option("--out", args->out, "Directory to make")->required();
  export_command->add_option("--dtype", args->dtype, "Of the matrices; what training keeps exact is float32 always")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "f32"}));
  export_command->add_flag("--json", args->json, "Print as JSON");
  CLI::App* diff_command = add("diff", "Compare two checkpoints, tensor by tensor; exit code 1 when they differ",
                               "Checkpoint, run directory, or safetensors (file, index, directory)", diff);
  diff_command->add_option("other", args->other, "What to compare it with, likewise")->required();
  diff_command->add_flag("--shared", args->shared, "Only tensors that both hold");
  diff_command->add_flag("--json", args->json, "Print as JSON");
  CLI::App* prune_command = add("prune", "Delete old checkpoints", "Run directory", prune);
  prune_command->add_option("--keep-last", args->keep_last, "Newest ones to keep")
      ->capture_default_str()
      ->check(at_least(1));
  prune_command->add_option("--keep-every-steps", args->keep_every_steps, "Keep multiples of this step too; 0: none")
      ->capture_default_str()
      ->check(at_least(0));
}

}  // namespace tessera::cli
