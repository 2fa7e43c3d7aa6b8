#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/device.h"
#include "cli/output.h"
#include "cli/ranges.h"
#include "config/options.h"
#include "data/build.h"
#include "train/evaluate.h"
#include "train/metrics.h"
#include "train/parity.h"
#include "train/run_config.h"
#include "train/saved_model.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct Args {
  std::string checkpoint, store, ids, logits, grads;
  Device device = Device::cpu;
  int64_t context = 0, tokens = 262144;
  bool json = false;
};

std::string report_text(const train::EvalReport& r) {
  std::string text = fmt::format("{:.4f} bits/byte, {:.4f} nats/token on {} held-out tokens of {} documents\n\n",
                                 r.bits_per_byte, r.loss, r.tokens, r.documents);
  Table positions({"position", "loss", "+-", "tokens"});
  for (const auto& p : r.loss_by_position) {
    positions.add({fmt::format("{}-{}", p.from, p.to - 1), fmt::format("{:.3f}", p.loss), fmt::format("{:.3f}", p.ci),
                   std::to_string(p.tokens)});
  }
  Table routing({"layer", "MaxVio", "least load", "dead"});
  for (const auto& l : r.routing.layers) {
    routing.add({std::to_string(l.layer), fmt::format("{:.3f}", l.max_vio), fmt::format("{:.3f}", l.min_load),
                 std::to_string(l.dead)});
  }
  text += positions.text() + "\n";
  if (!r.routing.layers.empty()) {
    text += routing.text() + fmt::format("sampling floor of MaxVio: {:.3f}\n", r.routing.sampling_floor);
  }
  return text;
}

// The store and context of the run that made the checkpoint, unless given.
void fill_from_run(Args& args, const train::SavedModel& saved) {
  if (!saved.state.run_toml.empty()) {
    const train::RunConfig run = train::parse_run_config(saved.state.run_toml, saved.path + ": run");
    if (args.store.empty()) args.store = run.data.store;
    if (args.context == 0) args.context = run.data.context;
  }
  if (args.store.empty()) fail_user("--store is not given and {} names none; name a token store", saved.path);
  if (args.context == 0) args.context = saved.model.config().context;
}

void run_parity(const Args& args) {
  if (args.device != Device::cpu) fail_user("--ids compares in float32, on the CPU; leave --device out");
  if (args.logits.empty() && args.grads.empty()) {
    fail_user("--ids needs --logits FILE or --grads FILE to write to");
  }
  const train::ParityReport r = train::write_parity(args.checkpoint, args.ids, args.logits, args.grads);
  if (args.json)
    return print_json({{"tokens", r.tokens}, {"loss", r.loss}, {"logits", args.logits}, {"grads", args.grads}});
  print(fmt::format("{} tokens, mean next-token loss {:.7f} nats\n", r.tokens, r.loss));
}

void run(Args& args) {
  if (!args.ids.empty()) return run_parity(args);
  const train::SavedModel saved = train::load_saved_model(args.checkpoint, args.device);
  fill_from_run(args, saved);
  const data::Store store((fs::path(args.store) / "valid").string());
  if (!saved.state.tokenizer.empty()) data::check_tokenizer(store, saved.tokenizer()->fingerprint());
  if (store.meta().vocab_size > saved.model.config().vocabulary) {
    fail_user("{}: its tokenizer has {} ids, the model only {}; name the store the model was trained on", args.store,
              store.meta().vocab_size, saved.model.config().vocabulary);
  }
  if (args.context < 2) fail_user("--context is {}; a next-token loss needs at least 2", args.context);
  const int64_t batch_tokens = std::max<int64_t>(args.context, 8192);
  const data::ValidationSet set(store,
                                {.context = args.context, .max_tokens = args.tokens, .batch_tokens = batch_tokens});
  Arena arena(train::evaluation_bytes(saved.model, train::worst_packing(batch_tokens), Product::f32, args.device),
              args.device == Device::cuda ? Memory::gpu : Memory::host);
  Context ctx{args.device, arena};
  const train::EvalReport report = train::evaluate(ctx, saved.model, saved.weights, set, [](int64_t done, int64_t all) {
    show_progress(fmt::format("batch {}/{}", done, all));
  });
  clear_progress();
  if (!args.json) return print(report_text(report));
  print_json(nlohmann::ordered_json::parse(train::to_json(report)));
}

}  // namespace

void add_eval(CLI::App& app) {
  auto args = std::make_shared<Args>();
  CLI::App* command = app.add_subcommand("eval", "Loss on held-out text, by position, and a routing audit");
  command->add_option("checkpoint", args->checkpoint, "Checkpoint or run directory")->required();
  command->add_option("--store", args->store, "Token store; default: the run's");
  command->add_option("--context", args->context, "Tokens of a sequence; default: the run's")->check(at_least(1));
  command->add_option("--tokens", args->tokens, "Most held-out tokens to use; 0: all")
      ->capture_default_str()
      ->check(at_least(0));
  command->add_option("--ids", args->ids, "Parity with another system: safetensors file with a tensor 'ids'");
  command->add_option("--logits", args->logits, "With --ids: write logits (T, vocabulary), float32");
  command->add_option("--grads", args->grads, "With --ids: write gradients of the mean next-token loss");
  add_device_option(*command, args->device);
  command->add_flag("--json", args->json, "Print figures as JSON");
  command->callback([args] { run(*args); });
}

}  // namespace tessera::cli
